"""Rank processes on this machine that stay: starting one costs more than most measurements.

`LocalRanks(8)` starts eight processes; `run(function, ranks, …)` calls a function on some of them
at the same time, each with its rank, and returns what they return. Each may be put into the
network namespace of an emulated host first. They end with this process, however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from tutti.errors import TuttiError

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_SECURE_BITS, _KEEP_RIGHTS = 28, 1 << 2  # PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP


class RankError(TuttiError):
    """A rank that raised."""


def die_with_parent() -> None:
    """Let the kernel end this process when its parent ends."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)


def enter_network(holder: int) -> None:
    """Move this process into the network namespace of another."""
    with open(f"/proc/{holder}/ns/net", encoding="ascii") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "setns")


def leave_network() -> None:
    """Move this process into a network namespace of its own."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "unshare")


def become(user: int) -> None:
    """Take another user's number, by which routes are chosen, and keep what root may do."""
    ctypes.CDLL(None).prctl(_SECURE_BITS, _KEEP_RIGHTS, 0, 0, 0)
    os.setuid(user)


def _serve(pipe: Connection, rank: int, holder: int, user: int) -> None:
    os.setpgrp()
    if holder:
        enter_network(holder)
    if user:
        become(user)
    while True:
        try:
            function, args = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            pipe.send((True, function(rank, *args)))
        except Exception as error:
            try:
                pipe.send((False, f"rank {rank}: {error!r}\n{traceback.format_exc()}"))
            except OSError:  # nobody is left to answer to
                os._exit(0)


class StandingRanks:
    """Rank processes that wait for work."""

    def __init__(
        self,
        size: int,
        homes: Sequence[tuple[int, int]] = (),
        *,
        imports: Sequence[str] = (),
    ) -> None:
        """Start them; `homes`: for each rank the process whose network it joins, and its user.

        `imports` are modules that all will need: the server they come from loads them once, if it
        does not run yet.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "tutti.comm", __name__, *imports])
        self._ranks: list[tuple[Any, Connection]] = []
        for rank in range(size):
            holder, user = homes[rank] if homes else (0, 0)
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, holder, user), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self._ranks)

    def pid(self, rank: int) -> int:
        """Return a rank's process."""
        pid: int = self._ranks[rank][0].pid
        return pid

    def start(self, function: Callable[..., Any], ranks: Sequence[int], *args: Any) -> None:
        """Call a function on some ranks, without waiting."""
        for rank in ranks:
            self._ranks[rank][1].send((function, args))

    def answer(self, rank: int, timeout_s: float = 60.0) -> Any:
        """Return what a rank's function returned."""
        pipe = self._ranks[rank][1]
        if not pipe.poll(timeout_s):
            raise RankError(f"rank {rank} has not answered after {timeout_s:g} s")
        try:
            good, value = pipe.recv()
        except EOFError:
            raise RankError(f"rank {rank} ended") from None
        if not good:
            raise RankError(value)
        return value

    def run(
        self,
        function: Callable[..., Any],
        ranks: Sequence[int],
        *args: Any,
        timeout_s: float = 60.0,
    ) -> list[Any]:
        """Call a function on some ranks and return their answers."""
        self.start(function, ranks, *args)
        answers, errors = [], []
        for rank in ranks:
            try:
                answers.append(self.answer(rank, timeout_s))
            except RankError as error:
                errors.append(str(error))
        if errors:
            raise RankError("\n".join(errors))
        return answers

    def close(self) -> None:
        """End them all."""
        for _, pipe in self._ranks:
            pipe.close()
        for process, _ in self._ranks:
            process.join(2)
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                process.join(5)
