"""Ranks that take turns: a step of tutti's, a step of torch's, processor time of each.

Processor time counts, of all threads of a rank, so that other jobs of the machine matter little;
both sides stay in the same processes, and ranks meet before each step.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from tutti.bench.cpu.contenders import WAYS, Size, Step, Way, our_step, their_step
from tutti.comm import Communicator
from tutti.comm.connect import connect
from tutti.launch.secret import Secret, new_secret
from tutti.ranks.standing_processes import StandingRanks

_START_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsQuestion:
    """What is timed."""

    size: Size
    rounds: int
    steps: int


class Used(NamedTuple):
    """Processor seconds of a round, and the loss that it ended with."""

    ours: float
    theirs: float
    our_loss: float
    their_loss: float


class Round(NamedTuple):
    """Tokens per processor second, of all ranks together."""

    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        """How many times as many tokens tutti's side trains."""
        return self.ours / self.theirs


class WayRounds(NamedTuple):
    """All rounds of a way, and the mean losses that both sides ended with."""

    way: Way
    rounds: tuple[Round, ...]
    our_loss: float
    their_loss: float


def measure(asked: TurnsQuestion, tell: Callable[[str], None]) -> Iterator[WayRounds]:
    """Yield each way's rounds."""
    for way in WAYS:
        tell(f"{way.name} beside {way.peer}")
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            ranks = StandingRanks(way.ranks, imports=[__name__, "transformers"])
            stack.callback(ranks.close)
            secret = Secret(new_secret().encode())
            waits = _START_S + 60.0 * asked.rounds * asked.steps
            answers = ranks.run(
                time_rank, range(way.ranks), way, asked, folder, secret, timeout_s=waits
            )
        yield _together(way, asked, answers)


def _together(way: Way, asked: TurnsQuestion, answers: list[list[Used]]) -> WayRounds:
    tokens = way.ranks * asked.size.tokens * asked.steps
    rounds = tuple(
        Round(tokens / sum(u.ours for u in each), tokens / sum(u.theirs for u in each))
        for each in zip(*answers, strict=True)
    )
    last = [answered[-1] for answered in answers]
    return WayRounds(
        way,
        rounds,
        sum(u.our_loss for u in last) / len(last),
        sum(u.their_loss for u in last) / len(last),
    )


def time_rank(rank: int, way: Way, asked: TurnsQuestion, folder: str, secret: Secret) -> list[Used]:
    """Take turns as one rank."""
    torch.set_num_threads(1)
    if way.ranks == 1:
        return _turns(
            asked, our_step(way, asked.size, 0, None), their_step(way, asked.size, 0), None
        )
    store = FileStore(f"{folder}/gloo", way.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=way.ranks)
    comm = connect(
        FileStore(f"{folder}/comm", way.ranks), rank, way.ranks,
        timeout_s=_START_S, start_timeout_s=_START_S, secret=secret,
    )  # fmt: skip
    try:
        ours, theirs = our_step(way, asked.size, rank, comm), their_step(way, asked.size, rank)
        return _turns(asked, ours, theirs, comm)
    finally:
        comm.close()
        dist.destroy_process_group()


def _turns(asked: TurnsQuestion, ours: Step, theirs: Step, comm: Communicator | None) -> list[Used]:
    rounds = []
    for step in (ours, theirs):
        step()
    for _ in range(asked.rounds):
        used, losses = [0.0, 0.0], [0.0, 0.0]
        for _ in range(asked.steps):
            for side, step in enumerate((ours, theirs)):
                if comm is not None:
                    comm.barrier().wait()
                begin = time.process_time()
                losses[side] = step()
                used[side] += time.process_time() - begin
        rounds.append(Used(*used, *losses))
    return rounds
