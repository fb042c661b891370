"""Runs a deployment event by event: arrivals, steps that end, keys and values that arrive.

Equal engines are simulated once: the others' requests are dealt and left out. Of prefill engines as
many are simulated as feed one decode engine of each kind that they have routes to.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tutti.cost.serving.engine_prices import (
    EnginePrices,
    MeasuredPools,
    engine_prices,
    import_wire,
    request_bytes,
    require_room_on_hosts,
)
from tutti.cost.serving.stage_prices import Formats
from tutti.cost.serving.transfers import TransferWire
from tutti.errors import InputError
from tutti.plan.check import embedded_cluster, embedded_model
from tutti.plan.plan import Plan
from tutti.plan.serving import Role
from tutti.simulate.serving.dealing import Onward, dealt
from tutti.simulate.serving.engine_groups import is_plain
from tutti.simulate.serving.groups import simulate_groups
from tutti.simulate.serving.requests import Requests
from tutti.simulate.serving.result import ServingResult, sum_up
from tutti.simulate.serving.simulated_engine import Job, Lane, SimulatedEngine, TimedStep

ARRIVAL, KEYS, STEP, READY = range(4)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Deployment:
    """What is simulated: the engines of a plan, priced."""

    plan: Plan
    prices: tuple[EnginePrices, ...]  # of each pipeline
    wires: dict[tuple[int, int], TransferWire]  # by route

    @classmethod
    def of(cls, plan: Plan, measured: MeasuredPools | None = None) -> Deployment:
        """Price the engines of a plan."""
        model, cluster = embedded_model(plan), embedded_cluster(plan)
        if plan.job.serving is None:
            raise InputError("plan: is for training; tutti plan --serve makes one for serving")
        require_room_on_hosts(plan, model, cluster)
        longest = plan.job.sequence_length
        prices = tuple(
            engine_prices(model, cluster, pipeline, longest, measured)
            for pipeline in plan.pipelines
        )
        wires = {
            (route.prefill, route.decode): import_wire(
                cluster, plan.pipelines[route.prefill], plan.pipelines[route.decode]
            )
            for route in plan.routes
        }
        return cls(plan=plan, prices=prices, wires=wires)

    def simulated(self) -> list[int]:
        """Return how many engines of each pipeline stand for all of them."""
        copies = [pipeline.copies for pipeline in self.plan.pipelines]
        simulated = [1] * len(copies)
        for route in self.plan.routes:
            feeding = -(-copies[route.prefill] // copies[route.decode])
            simulated[route.prefill] = max(simulated[route.prefill], feeding)
        return simulated


def simulate_serving(
    deployment: Deployment,
    requests: Requests,
    *,
    every_engine: bool = False,
    keep_steps: int = 0,
) -> ServingResult:
    """Return what requests see of a deployment, and what its chips do.

    `every_engine` simulates equal engines each; `keep_steps` is how many steps a trace may have.
    """
    _require_short(deployment, requests)
    copies = [pipeline.copies for pipeline in deployment.plan.pipelines]
    shown = copies if every_engine else deployment.simulated()
    plan, prices = deployment.plan, deployment.prices
    if not keep_steps and all(is_plain(each, requests) for each in prices):
        groups = simulate_groups(plan, prices, deployment.wires, shown, requests)
        return sum_up(plan, prices, requests, groups.jobs, groups.engines, (), groups.queue)
    run = _Run(deployment, requests, shown, keep_steps=keep_steps)
    run.go()
    engines, queue = [engine.record() for engine in run.engines], np.array(run.queue, np.float64)
    return sum_up(plan, prices, requests, run.jobs, engines, run.steps, queue)


def _require_short(deployment: Deployment, requests: Requests) -> None:
    longest = deployment.plan.job.sequence_length
    totals = requests.prompts + requests.outputs
    if len(totals) and int(totals.max()) > longest:
        where = int(totals.argmax())
        raise InputError(
            f"request {where + 1}: {int(requests.prompts[where]):,} + "
            f"{int(requests.outputs[where]):,} tokens; the plan's engines take {longest:,}"
        )


class _Run:
    """The state of one simulation."""

    def __init__(
        self, deployment: Deployment, requests: Requests, shown: Sequence[int], *, keep_steps: int
    ) -> None:
        self._deployment, self._requests = deployment, requests
        self._keep = keep_steps
        plan = deployment.plan
        self.engines: list[SimulatedEngine] = []
        self._groups: list[list[SimulatedEngine]] = [[] for _ in deployment.prices]
        for p, prices in enumerate(deployment.prices):
            for _ in range(shown[p]):
                engine = SimulatedEngine(
                    len(self.engines), p, prices, prefix=requests.shares_prefixes
                )
                self.engines.append(engine)
                self._groups[p].append(engine)
        self._dealt = dealt(plan, shown, len(requests)).tolist()
        self._onward = Onward(plan, shown)
        self._sent = {engine.number: 0.0 for engine in self.engines}  # when its link is free
        self._bytes = [
            request_bytes(prices.model, Formats(cache=prices.engine.cache))
            for prices in deployment.prices
        ]
        self.jobs: list[Job] = []
        self.steps: list[TimedStep] = []
        self.queue: list[tuple[float, int, int]] = []  # time, waiting, with a slot
        self._held = [[(0, 0)] * len(engine.lanes) for engine in self.engines]
        self._totals = [0, 0]
        self._events: list[tuple[float, int, int, Any]] = []
        self._number = 0

    def _push(self, time: float, kind: int, what: Any) -> int:
        self._number += 1
        heapq.heappush(self._events, (time, self._number, kind, what))
        return self._number

    def go(self) -> None:
        """Let everything happen."""
        self._push_arrival(0)
        while self._events:
            now, number, kind, what = heapq.heappop(self._events)
            if kind == ARRIVAL:
                self._arrive(what, now)
            elif kind == KEYS:
                self._import(what[0], what[1], now)
            elif kind == READY:
                self._kick(what[0], what[1], now)
            elif what[1].due == number:  # else it ended before
                self._ended(what[0], what[1], now)

    # --- events ------------------------------------------------------------------------------

    def _push_arrival(self, place: int) -> None:
        if place < len(self._dealt):
            self._push(float(self._requests.times[self._dealt[place][0]]), ARRIVAL, place)

    def _arrive(self, place: int, now: float) -> None:
        requests = self._requests
        self._push_arrival(place + 1)
        index, group = self._dealt[place]
        job = Job(index, now, int(requests.prompts[index]), int(requests.outputs[index]))
        self.jobs.append(job)
        role = self._deployment.prices[group].engine.role
        if role is Role.DECODE:  # alone: its keys were made elsewhere
            job.first_s = job.finished_s = now
            if job.output > 1:
                self._import(group, job, now)
            return
        engine = min(self._groups[group], key=lambda engine: engine.work)
        most_new = 1 if role is Role.PREFILL else job.output
        lane = engine.take(job, requests.tokens(index), most_new, now)
        self._kick(engine, lane, now)

    def _kick(self, engine: SimulatedEngine, lane: Lane, now: float) -> None:
        """Let a lane make a step if it has none and the first stage is free."""
        if lane.ends is not None:
            full = not lane.scheduler.slots.num_free  # who comes waits for one that leaves
            sooner = None if full else engine.interrupt(lane, now)
            if sooner is not None:
                lane.due = self._push(sooner, STEP, (engine, lane))
            return
        if lane.under_way:
            return
        if engine.next_free() > now + 1e-12:
            self._push(engine.next_free(), READY, (engine, lane))
            return
        step = engine.begin(lane, now)
        if step is None:
            return
        if len(self.steps) < self._keep:
            self.steps.append(step)
        lane.due = self._push(step.ends_s, STEP, (engine, lane))

    def _ended(self, engine: SimulatedEngine, lane: Lane, now: float) -> None:
        for job in engine.end(lane, now):
            if self._onward.sends(engine.group) and job.output > 1:
                self._send(engine, job, now)
        self._note_queue(engine, lane, now)
        self._kick(engine, lane, now)

    def _note_queue(self, engine: SimulatedEngine, lane: Lane, now: float) -> None:
        waiting, busy = engine.held(lane)
        if waiting:
            lane.waited_s = now
        own = self._held[engine.number]
        before, own[lane.number] = own[lane.number], (waiting, busy)
        self._totals[0] += waiting - before[0]
        self._totals[1] += busy - before[1]
        self.queue.append((now, self._totals[0], self._totals[1]))

    def _send(self, engine: SimulatedEngine, job: Job, now: float) -> None:
        """Let keys and values follow: layers leave as they are computed, one job after another."""
        job.finished_s = -1.0
        target, mine = self._onward.next(engine.group)
        if not mine:
            job.left = True
            return  # an equal engine that is not simulated goes on with it
        wire = self._deployment.wires[engine.group, target]
        taken = wire.seconds(job.prompt * self._bytes[engine.group])
        begins = max(job.began_s, self._sent[engine.number])
        self._sent[engine.number] = begins + taken
        layers = engine.prices.model.num_layers
        self._push(max(begins + taken, now + taken / layers), KEYS, (target, job))

    def _import(self, group: int, job: Job, now: float) -> None:
        engine = min(self._groups[group], key=lambda engine: engine.work)
        tokens = (*self._requests.tokens(job.index), 1)
        lane = engine.take(job, tokens, job.output - 1, now)
        self._kick(engine, lane, now)
