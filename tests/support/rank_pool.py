"""Rank processes that stay for a whole test session: starting one costs more than most tests.

They come from a fork server that has imported what all need and runs nothing: no process is forked
from one with threads. A rank that dies or hangs is named; then all are ended, and the next call
starts anew.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tutti.launch.secret import Secret
from tutti.ranks.standing_processes import RankError, StandingRanks

SECRET = Secret(b"what the ranks of tests know of each other")
IMPORTS = (
    "tutti.train.sync.comm_links", "tutti.train.engine.engine", "tutti.serve",
    "tests.support.training",
)  # fmt: skip


class RankPool:
    """Up to `size` ranks, started when first asked for, that meet at a store of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: StandingRanks | None = None
        self._store: dist.TCPStore | None = None
        self._jobs = 0

    @property
    def port(self) -> int:
        """Where the store is."""
        self._started()
        assert self._store is not None
        return self._store.port

    def pid(self, rank: int) -> int:
        return self._started().pid(rank)

    def start(self, function: Callable[..., Any], ranks: Sequence[int], *args: Any) -> None:
        """Call a function of a module on some ranks, each with its rank, without waiting."""
        started = self._started()
        for rank in ranks:
            started.start(_single_threaded, [rank], function, args)

    def answer(self, rank: int, timeout_s: float = 60.0) -> Any:
        return self._started().answer(rank, timeout_s)

    def run(
        self,
        function: Callable[..., Any],
        ranks: Sequence[int],
        *args: Any,
        timeout_s: float = 60.0,
    ) -> list[Any]:
        """Call a function on some ranks and return their answers; errors of all ranks as one.

        The pool is rebuilt when a rank did not answer in time, or died.
        """
        self.start(function, ranks, *args)
        until = time.monotonic() + timeout_s
        answers, errors = [], []
        for rank in ranks:
            try:
                answers.append(self.answer(rank, max(0.1, until - time.monotonic())))
            except RankError as error:
                errors.append(str(error))
        if errors:
            if any("has not answered" in text or text.endswith("ended") for text in errors):
                self.close()
            raise RankError("\n".join(errors))
        return answers

    def meet(
        self, function: Callable[..., Any], size: int, *args: Any, timeout_s: float = 60.0
    ) -> list[Any]:
        """Call `function(rank, store_port, job_name, *args)` on `size` ranks that will connect."""
        self._jobs += 1
        name = f"job-{self._jobs}"
        return self.run(function, range(size), self.port, name, *args, timeout_s=timeout_s)

    def _started(self) -> StandingRanks:
        if self._ranks is None:
            self._store = dist.TCPStore(
                "127.0.0.1", 0, None, is_master=True, wait_for_workers=False
            )
            self._ranks = StandingRanks(self.size, imports=IMPORTS)
        return self._ranks

    def close(self) -> None:
        """End all ranks, whatever they do."""
        ranks, self._ranks, self._store = self._ranks, None, None
        if ranks is None:
            return
        for rank in range(ranks.size):
            with contextlib.suppress(ProcessLookupError):
                os.kill(ranks.pid(rank), signal.SIGKILL)
        ranks.close()


def _single_threaded(rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    return function(rank, *args)
