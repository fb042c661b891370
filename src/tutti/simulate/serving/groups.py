"""A deployment group by group: prefill engines before the decode engines that they feed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tutti.cost.serving.engine_prices import EnginePrices, request_bytes
from tutti.cost.serving.stage_prices import Formats
from tutti.cost.serving.transfers import TransferWire
from tutti.plan.plan import Plan
from tutti.plan.serving import Role
from tutti.simulate.serving.dealing import Onward, dealt
from tutti.simulate.serving.engine_groups import GroupRun, merged, run_group
from tutti.simulate.serving.requests import Requests
from tutti.simulate.serving.simulated_engine import EngineRecord, Job, Used

F64 = NDArray[np.float64]


class Simulated(NamedTuple):
    """What was seen of all groups."""

    jobs: list[Job]
    engines: list[EngineRecord]
    queue: F64


def simulate_groups(
    plan: Plan,
    prices: Sequence[EnginePrices],
    wires: Mapping[tuple[int, int], TransferWire],
    shown: Sequence[int],
    requests: Requests,
) -> Simulated:
    """Simulate a deployment whose groups are all plain (`engine_groups.is_plain`)."""
    onward = Onward(plan, shown)
    entries = dealt(plan, shown, len(requests))
    index = entries[:, 0]
    columns = (index, requests.times[index], requests.prompts[index], requests.outputs[index])
    jobs = [Job(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
    sent: dict[int, list[tuple[float, Job]]] = {}
    engines, queues = [], []
    for group, each in enumerate(prices):
        mine = [jobs[place] for place in np.flatnonzero(entries[:, 1] == group).tolist()]
        if not mine:
            continue
        role = each.engine.role
        asked = [
            (job.arrived_s, job.prompt, 1 if role is Role.PREFILL else job.output) for job in mine
        ]
        if role is Role.DECODE:  # alone: keys were made elsewhere
            for job in mine:
                job.first_s = job.finished_s = job.arrived_s
            mine = [job for job in mine if job.output > 1]
            asked = [(job.arrived_s, job.prompt + 1, job.output - 1) for job in mine]
        if not mine:
            continue
        done = _ran(each, shown[group], mine, asked)
        engines += _records(group, each, done)
        queues.append(done.queue)
        if onward.sends(group):
            for time, target, job in _sent(each, group, wires, onward, mine, done):
                sent.setdefault(target, []).append((time, job))
    for group in sorted(sent):
        came = sorted(sent[group], key=lambda item: item[0])
        asked = [(time, job.prompt + 1, job.output - 1) for time, job in came]
        done = _ran(prices[group], shown[group], [job for _, job in came], asked)
        engines += _records(group, prices[group], done)
        queues.append(done.queue)
    for group in set(range(len(prices))) - {engine.group for engine in engines}:  # nobody came
        idle = EngineRecord(group, Used([0.0] * len(prices[group].stages)), 0.0)
        engines += [idle] * shown[group]
    engines.sort(key=lambda engine: engine.group)
    return Simulated(jobs, engines, merged(queues) if queues else np.zeros((0, 3)))


def _ran(
    prices: EnginePrices,
    engines: int,
    jobs: Sequence[Job],
    asked: Sequence[tuple[float, int, int]],
) -> GroupRun:
    """Simulate a group on jobs: when each comes, tokens of its prompt and of its answer."""
    times, prompts, most_new = (np.array(column) for column in zip(*asked, strict=True))
    done = run_group(prices, engines, times, prompts, most_new)
    seen = (done.began_s.tolist(), done.first_s.tolist(), done.ended_s.tolist())
    for job, began, first, ended in zip(jobs, *seen, strict=True):
        job.began_s, job.finished_s = began, ended
        job.first_s = first if job.first_s < 0 else job.first_s
    return done


def _records(group: int, prices: EnginePrices, done: GroupRun) -> list[EngineRecord]:
    from tutti.simulate.serving.group_loop import (
        MADE,
        MADE_LOST,
        MADE_ROWS,
        MADE_TOKENS,
        MOST_PAGES,
    )

    waited = done.waited_s.reshape(len(done.use), prices.lanes).min(axis=1)
    return [
        EngineRecord(
            group,
            Used(
                busy.tolist(), int(use[MADE]), int(use[MADE_TOKENS]), int(use[MADE_ROWS]),
                int(use[MADE_LOST]), most_pages=int(use[MOST_PAGES]),
            ),
            float(until),
        )
        for busy, use, until in zip(done.busy_s, done.use, waited, strict=True)
    ]  # fmt: skip


def _sent(
    prices: EnginePrices,
    group: int,
    wires: Mapping[tuple[int, int], TransferWire],
    onward: Onward,
    jobs: Sequence[Job],
    done: GroupRun,
) -> list[tuple[float, int, Job]]:
    """Return when whose keys and values arrive, and at which group.

    Layers leave as they are computed, one job after another.
    """
    each = request_bytes(prices.model, Formats(cache=prices.engine.cache))
    layers, free = prices.model.num_layers, [0.0] * len(done.use)
    arrive = []
    for place in done.order.tolist():
        job, engine = jobs[place], int(done.engine[place])
        if job.output <= 1:
            continue
        now, job.finished_s = job.finished_s, -1.0
        target, mine = onward.next(group)
        if not mine:
            job.left = True  # an equal engine that is not simulated goes on with it
            continue
        taken = wires[group, target].seconds(job.prompt * each)
        begins = max(job.began_s, free[engine])
        free[engine] = begins + taken
        arrive.append((max(begins + taken, now + taken / layers), target, job))
    return arrive
