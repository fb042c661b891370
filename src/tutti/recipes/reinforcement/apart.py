"""Chips of their own answer, one batch ahead, while the others train.

The answering chips are processes that the first training rank starts on its machine. They meet the
training ranks in a communicator of their own: at each meeting the batch that is ready is told to
all, then the newest weights are handed over and the next batch is begun. So a batch is sampled with
the weights of one batch before; its tokens' probabilities are those that the sampler drew them
with, and the loss is clipped against these.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from tutti.comm import Communicator
from tutti.comm.connect import connect
from tutti.comm.entry.store import StoreClient, StoreServer
from tutti.comm.entry.trust import Key
from tutti.comm.places import place_of
from tutti.errors import InputError
from tutti.hardware.topology import Position
from tutti.launch.secret import all_here, generation
from tutti.observe.folder import RUN_FILE
from tutti.ranks import rendezvous
from tutti.recipes.reinforcement.answering import Answers, Order
from tutti.recipes.reinforcement.generation import ends_of
from tutti.recipes.reinforcement.places import Load, answering_chips, apart_now, explained_apart
from tutti.recipes.reinforcement.weights import hand_over
from tutti.train.checkpoint.coordinator import Coordinator
from tutti.train.data.open_data import PackedData
from tutti.train.engine.engine import Engine
from tutti.train.run.planning import Job
from tutti.train.run.rank_context import RankContext

_HERE = "127.0.0.1"


def meet(job: Job, rank: int, port: int, accelerator: Any, position: Position) -> Communicator:
    """Return the communicator of all training and answering ranks."""
    world = job.plan.num_ranks + len(answering_chips(job))
    timeout_s, secret = job.config.timeout_s, rendezvous.job_secret()
    store = StoreClient(meeting_key(), rank, _HERE, port, timeout_s=timeout_s)
    return connect(
        store, rank, world, place=place_of(job.cluster, position), accelerator=accelerator,
        profile=job.chip_profiles(), timeout_s=timeout_s, start_timeout_s=timeout_s, secret=secret,
    )  # fmt: skip


def meeting_key() -> Key:
    """Return what those who meet know."""
    return Key(rendezvous.job_secret(), "rollouts", generation(os.environ))


class AnsweringAhead:
    """A training rank that has others answer."""

    def __init__(
        self,
        context: RankContext,
        engine: Engine,
        coordinator: Coordinator,
        data: PackedData,
        load: Load,
        stack: ExitStack,
    ) -> None:
        if not all_here(os.environ):
            raise InputError(
                "sampling.answering: chips that only answer are on the machine of the first rank; "
                "on several machines let all take turns"
            )
        assert data.tokenizer is not None
        self._context, self._engine, self._coordinator = context, engine, coordinator
        self._data, self._load = data, load
        self.ends = ends_of(context.config, engine.spec, data.tokenizer)
        self._begun: Order | None = None  # what the others are answering
        self._ready: dict[Order, Answers] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        stack.callback(self._end)
        port = self._started(stack) if coordinator.rank == 0 else 0
        port = coordinator.broadcast((port,))[0]
        context.say("waiting for the chips that answer")
        self._comm = meet(context.job, context.rank, port, engine.accelerator, context.position)
        stack.callback(self._comm.close)
        self._talk = self._comm.control("talk", context.config.timeout_s)
        self._teller = context.plan.num_ranks

    def _started(self, stack: ExitStack) -> int:
        """Start the answering ranks; return the port at which all meet."""
        job = self._context.job
        chips, first = answering_chips(job), job.plan.num_ranks
        server = StoreServer(meeting_key(), first + len(chips), _HERE, 0)
        stack.callback(server.close)
        logs = Path(job.config.folder) / "logs"
        logs.mkdir(exist_ok=True)
        for number in range(len(chips)):
            rank = first + number
            environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            environment.pop("TUTTI_EVENTS", None)
            command = [
                sys.executable, "-m", "tutti.recipes.reinforcement.answering_rank",
                str(job.config.folder / RUN_FILE), str(number), str(server.port),
            ]  # fmt: skip
            with (logs / f"answering-{number}.log").open("wb") as log:
                self._processes.append(
                    subprocess.Popen(
                        command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                    )
                )
        return server.port

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def start(self) -> str:
        """Hear whether what judges could be started, by the first that answers."""
        said: str = self._talk.broadcast_value(None, self._teller)
        return said

    def explain(self) -> list[str]:
        """Return in words who answers."""
        job = self._context.job
        return explained_apart(apart_now(job, self._load, job.predicted().step_seconds))

    def answered(self, order: Order, coming: Order | None) -> Answers:
        """Return a batch; then the newest weights are handed over for the one that is coming."""
        began = time.perf_counter()
        if self._begun != order and order not in self._ready:
            self._finish()
            self._begin(order)
        self._finish()
        waited = time.perf_counter()
        if coming is not None and coming not in self._ready:
            self._begin(coming)
        answers = self._ready.pop(order)
        answers.seconds["wait_s"] = waited - began
        answers.seconds["hand_over_s"] = time.perf_counter() - waited
        return answers

    def _begin(self, order: Order) -> None:
        self._talk.broadcast_value(asdict(order), 0)
        engine = self._engine
        hand_over(engine, engine.spec, None, self._add, engine.dtype, engine.accelerator.device)
        self._begun = order

    def _finish(self) -> None:
        """Hear of the batch that was begun, if there is one."""
        if self._begun is None:
            return
        order, self._begun = self._begun, None
        said = self._talk.broadcast_value(None, self._teller)
        for line in said.get("warnings", ()) if self._coordinator.rank == 0 else ():
            self._context.warn(line)
        prompts = order.records(self._data.train, self._data.validation)
        self._ready[order] = Answers.of(prompts, said, dict(said.get("seconds", {})))

    def _add(self, flat: Tensor) -> None:
        self._comm.all_reduce(flat).wait()
