"""The process of a rank that outlives generations: `main` runs in a child of the fork server.

It waits for its agent's commands. In a generation it is a `Worker` like any other; when the
generation ends because somebody was lost, it keeps its state, says how far it came, and waits for
the next one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch

from tutti.accelerator import Accelerator
from tutti.comm import Communicator
from tutti.comm.entry.store import StoreClient, StoreError
from tutti.comm.entry.trust import Key
from tutti.comm.errors import CommError
from tutti.elastic.journal import require_current
from tutti.elastic.messages import Order, Standing
from tutti.errors import InputError, TuttiError
from tutti.observe.folder import RUN_FILE
from tutti.observe.pulse import Activity, Pulse
from tutti.plan.files import load_plan
from tutti.ranks.devices import open_chip
from tutti.ranks.events import PipeEvents
from tutti.ranks.rendezvous import job_secret
from tutti.train.checkpoint import Progress
from tutti.train.data.open_data import PackedData
from tutti.train.elastic.donors import connect_with_donors, give, offers_of
from tutti.train.elastic.drills import install
from tutti.train.elastic.finish_step import finish_step
from tutti.train.elastic.generation_events import GenerationEvents, live_generation
from tutti.train.elastic.held_state import HeldState, fill, let_go
from tutti.train.elastic.host_copies import HostCopies, labelled
from tutti.train.elastic.warm_imports import data_of, warm, warmed
from tutti.train.engine.step_totals import StepResult
from tutti.train.run.build_rank import begin_weights, build_engine, join, load_weights
from tutti.train.run.planning import Job, prepared
from tutti.train.run.rank_context import RankContext
from tutti.train.run.safety import hardware_differences
from tutti.train.run.worker import PausedError, StopRequest, Worker
from tutti.train.sync.comm_links import CommLinks

__all__ = ["main", "warm"]  # what the fork server calls

_MOST_WHY = 300  # letters
BEAT_S = 0.1  # of the thread that owns the connections


def main(descriptors: Sequence[int]) -> int:
    """Be a rank's process until told to end."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    rank = ElasticRank(PipeEvents(descriptors[0]), descriptors[1])
    try:
        rank.serve()
    except BaseException as error:
        traceback.print_exception(error)
        text = str(error).strip().splitlines()
        line = text[0] if text else type(error).__name__
        known = isinstance(error, TuttiError) and not isinstance(error, CommError)
        line = line if known else f"{type(error).__name__}: {line}"
        if known:  # no restart mends it
            rank.events.send("fatal", text=f"{rank.name}: {line}")
        else:
            rank.events.send("error", text=line)
        return 1
    return 0


class ElasticRank:
    """One chip's process."""

    def __init__(self, events: PipeEvents, commands: int) -> None:
        self.events = events
        self.chip, self.process = os.environ["TUTTI_CHIP"], int(os.environ["TUTTI_PROCESS"])
        self.folder, self.memory = Path(os.environ["TUTTI_RUN"]), Path(os.environ["TUTTI_MEMORY"])
        self.name = self.chip
        self.generation, self.rank = 0, -1
        self.standing = Standing.IDLE
        self.stop = StopRequest()
        self.pulse = Pulse(Path(os.environ["TUTTI_PULSE"]), rank=0)
        known = warmed(self.folder)
        self._job: Job | None = known[0] if known is not None else None
        self._data: PackedData | None = known[1] if known is not None else None
        self._accelerator: Accelerator | None = None
        self._copies: HostCopies | None = None
        self._live: Worker | None = None  # of the generation that it left, or is in
        self._kept: HeldState | None = None  # of an earlier one
        self._held = (0, -1)  # generation and rank by which that lies
        self._open: tuple[StoreClient | None, Communicator | None] = (None, None)
        self._told_to_leave = 0
        self._why = ""  # it left its generation, if by itself
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self._orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, args=(commands,), daemon=True).start()

    def serve(self) -> None:
        """Enter generations as told, until told to end."""
        job_secret()
        self._say(Standing.IDLE)
        while True:
            order = self._orders.get()
            if order is None:
                return
            if "leave" in order:
                if self.standing is Standing.DONE:
                    self._say(Standing.IDLE)
                continue
            if "free" in order:
                self._live, self._kept, self._held = None, None, (0, -1)
                self._say(Standing.IDLE)
                continue
            wanted = msgspec.convert(order["enter"], Order)
            if wanted.generation > self._told_to_leave:
                self._enter(wanted, int(order["rank"]))
            else:
                self.generation = wanted.generation
                self._say(Standing.IDLE)

    # --- commands ------------------------------------------------------------------------------

    def _listen(self, commands: int) -> None:
        with os.fdopen(commands, "r", encoding="utf-8") as file:
            for line in file:
                command = json.loads(line)
                if "end" in command:
                    break
                if "stop" in command:
                    self.stop.ask(int(command["stop"]))
                elif command.get("gentle"):
                    self._pause(int(command["leave"]))
                    self._orders.put(command)
                elif "leave" in command:
                    self._leave(int(command["leave"]), str(command.get("why", "")))
                    self._orders.put(command)
                else:
                    self._orders.put(command)
        self._orders.put(None)
        threading.Timer(2.0, os._exit, [0]).start()  # it may hang in something; nobody needs it

    def _pause(self, generation: int) -> None:
        """Let all ranks of a generation leave it after the step at hand."""
        live = self._live
        if live is not None and generation == self.generation and self.standing is Standing.RUNNING:
            live.pausing = True
        else:
            self._leave(generation, "it is over before it began")

    def _leave(self, generation: int, why: str) -> None:
        """Let whatever the main thread waits for in a generation fail."""
        with self._lock:
            self._told_to_leave = max(self._told_to_leave, generation)
            store, comm = self._open
        if generation != self.generation:
            return
        if comm is not None:
            comm.abort(f"generation {generation} is over: {why}")
        elif store is not None:
            store.close()

    def _opened(self, store: StoreClient | None, comm: Communicator | None) -> None:
        with self._lock:
            self._open = (store, comm)
            left = self._told_to_leave >= self.generation
        if left and (store is not None or comm is not None):
            raise StoreError(f"generation {self.generation} is over")

    def _say(self, standing: Standing, copies: Sequence[tuple[int, int]] | None = None) -> None:
        """Tell the agent where this process stands; `copies` are looked for if not given."""
        self.standing = standing
        live, pending = self._live, 0
        step = self._kept.step if self._kept is not None else -1
        held, sums = self._held, list[float]()
        if live is not None:
            step, held = live.progress.step, (live_generation(live), live.context.rank)
            pending = step + 1 if live.engine.end.pending else 0
            if standing is Standing.IDLE:
                sums = live.engine.end.sums()
        if copies is None:
            copies = [(g, s) for chip, g, s, _ in labelled(self.memory) if chip == self.chip]
        self.events.send(
            "standing", standing=standing.value, generation=self.generation, step=step,
            pending=pending, sums=sums, held=held[0], held_rank=held[1], copy_steps=copies,
            why=self._why,
        )  # fmt: skip

    # --- a generation --------------------------------------------------------------------------

    def _enter(self, order: Order, rank: int) -> None:
        self.generation, self.rank, self._why = order.generation, rank, ""
        self.pulse.enter(order.generation)
        self.pulse.at(-1, Activity.MOVING)
        try:
            self._settle(order)
            offers = offers_of(order, self.chip, self._kept, self.memory)
            if rank >= len(order.seats):
                self._give(order, rank, offers)
                return
            job = self._job_of(order.plan)
            position = job.cluster.pool(self.chip.split("/")[0]).chip
            slot = int(self.chip.split("/")[2])
            events = GenerationEvents(self.events, order.generation)
            context = RankContext.of(job, rank, events, led=True)
            self.name = context.name
            if self._accelerator is None:
                self._accelerator = open_chip(position, slot)
                for line in hardware_differences(self._accelerator, position):
                    context.warn(f"{context.name}: {line}")
            with ExitStack() as stack:
                stack.callback(self._opened, None, None)
                self._train(context, order, offers, stack)
        except (CommError, StoreError, PausedError) as error:
            self._left(error)

    def _settle(self, order: Order) -> None:
        """Keep what this process holds of the step that all go on from; let go of the rest."""
        source = order.source
        assert source is not None
        counts = source.kind == "memory" and self.chip in source.holders
        live, self._live = self._live, None
        if live is not None and counts:
            if live.progress.step < source.step and live.engine.end.pending:
                self._finished(live, finish_step(live.engine, source.sums))
            same = live.context.plan == load_plan(self.folder / order.plan)
            self._kept = HeldState.taken(live.engine, live.progress, same_plan=same)
            self._held = (live_generation(live), live.context.rank)
        if not counts:
            self._kept, self._held = None, (0, -1)
        if live is not None and self._accelerator is not None:
            if self._copies is not None:
                self._copies.forget_engine()
            del live
            let_go(self._accelerator)

    def _give(self, order: Order, rank: int, offers: list[HeldState]) -> None:
        """Give this process's state to the seats of a generation, and have no part in it."""
        assert order.source is not None
        with ExitStack() as stack:
            stack.callback(self._opened, None, None)
            store = self._met(order, rank, self._job_of(order.plan).config.timeout_s, stack)
            give(order, rank, store, offers, stack, lambda comm: self._opened(store, comm))
        self._say(Standing.IDLE)  # what it gave it keeps until all run

    def _met(self, order: Order, rank: int, timeout_s: float, stack: ExitStack) -> StoreClient:
        """Return the store where those of a generation meet."""
        host, _, port = order.address.rpartition(":")
        key = Key(job_secret(), "store", f"generation-{order.generation}")
        store = StoreClient(key, rank, host, int(port), timeout_s=timeout_s)
        stack.callback(store.close)
        self._opened(store, None)
        return store

    def _job_of(self, plan: str) -> Job:
        """Return the job under a plan; the rest of it stays."""
        if self._job is None:
            self._job = Job.load(self.folder / RUN_FILE)
        loaded = load_plan(self.folder / plan)
        return prepared(self._job.config, loaded)

    def _train(
        self, context: RankContext, order: Order, offers: list[HeldState], stack: ExitStack
    ) -> None:
        store = self._met(order, context.rank, context.config.timeout_s, stack)
        assert self._accelerator is not None
        assert order.source is not None
        joined = join(context, self._accelerator, stack, store)
        self._opened(store, joined.comm)
        joined.comm.watch(BEAT_S, self.pulse.links)
        if self._data is None:
            self._data = data_of(context.job)
        fingerprints = joined.saving.gather(self._data.fingerprint)
        if fingerprints is not None and len(set(fingerprints)) > 1:
            raise InputError("the ranks have different data; give all nodes the same files")
        predicted = context.job.predicted()
        links = CommLinks(joined.comm, context.plan, context.spec, context.job.cluster)
        engine = build_engine(context, self._accelerator, links, predicted)

        def load(worker: Worker) -> Progress:
            return self._load(worker, order, store, offers)

        worker = Worker(
            context, joined, links, (engine, predicted), self.stop, stack, load=load,
            data=self._data, may_publish=lambda: require_current(self.folder, order.generation),
        )  # fmt: skip
        offers.clear()
        joined.meet()  # all have their state: from here on it counts, and the old one is free
        self._live, self._kept, self._held = worker, None, (0, -1)
        engine.end.pulse = self.pulse
        self._begin_copies(worker, order)
        elastic = context.config.elastic
        install(worker, elastic.drill if elastic is not None else (), self.folder, self.chip)
        self._say(Standing.RUNNING)
        summary = worker.train()
        if context.rank == 0:
            context.events.send("done", **summary)
        self._say(Standing.DONE)

    def _load(
        self, worker: Worker, order: Order, store: StoreClient, offers: list[HeldState]
    ) -> Progress:
        context, engine, source = worker.context, worker.engine, order.source
        assert source is not None
        tuning = context.spec.tuning
        if source.kind == "memory" and tuning is not None and tuning.adapter is not None:
            begin_weights(context, engine)  # memory, as checkpoints, has only what is trained
        if source.kind == "memory" and order.donors:
            with ExitStack() as stack:
                comm = connect_with_donors(order, context.rank, store, context.job)
                stack.callback(comm.close)
                facts = fill(engine, comm.control("control"), offers, source.step)
                comm.barrier().wait()  # donors may let go
            return facts.progress
        if source.kind == "memory":
            return fill(engine, worker.joined.control, offers, source.step).progress
        resume = source.step if source.kind == "disk" else False
        return load_weights(context, engine, worker.checkpointer, worker.data, resume)

    def _begin_copies(self, worker: Worker, order: Order) -> None:
        elastic = worker.context.config.elastic
        every = elastic.copies if elastic is not None else 0
        if elastic is None or not every:
            return
        # with one host left there is nobody to bring copies to
        partners = bool(elastic.partners) and len(order.copy_addresses) > 1
        copies = self._copies = HostCopies(
            self.memory, self.chip, self.generation, every=every, partners=partners,
            gone=lambda: self._told_to_leave >= order.generation,
            rooms=self._copies.rooms if self._copies is not None else None,
        )  # fmt: skip
        told = list[tuple[int, int]]()

        def after_step() -> None:
            whole = copies.whole
            if whole != told:
                told[:] = whole
                self._say(self.standing, whole)
            if worker.progress.step % every == 0:
                copies.take(worker.engine, worker.progress)

        worker.engine.before_update = copies.wait
        worker.after_step = after_step

    # --- between two -----------------------------------------------------------------------------

    def _left(self, error: BaseException) -> None:
        """Say how far this rank came; what only needs its own work of a step is done first."""
        sys.stderr.write(f"generation {self.generation}: {error}\n")
        sys.stderr.flush()
        self.pulse.at(-1, Activity.IDLE)
        live = self._live
        if self._told_to_leave < self.generation and not isinstance(error, PausedError):
            self._why = str(error).splitlines()[0][:_MOST_WHY]
        if live is not None and live_generation(live) == self.generation:
            if self._copies is not None:
                with contextlib.suppress(InputError):
                    self._copies.wait()
            for record in live.measure.recent:
                live.context.events.send("step", **record.to_document(), late=True)
            if live.engine.end.decided:
                self._finished(live, finish_step(live.engine))
        self._say(Standing.IDLE)

    def _finished(self, worker: Worker, result: StepResult) -> None:
        """Take a step that was finished without the others."""
        seconds = worker.history.steady_s or 1e-3  # it was cut off: what steps take, roughly
        record = worker.advance(result, seconds)
        worker.context.events.send("step", **record.to_document(), late=True)
