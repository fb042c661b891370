"""Clocks of several hosts, laid over each other.

Ranks under one kernel share its clock. Between hosts, rank 0 asks one rank of each other host for
its time, several times, and believes the quickest answer: its clock was read about half-way.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tutti.comm import Communicator

ROUNDS = 8
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # where Linux names a running kernel


@dataclass(frozen=True, slots=True)
class Offset:
    """How far a host's clock is ahead of rank 0's, and how wrong that may be."""

    seconds: float
    error_s: float


def kernel_name() -> str:
    """Return what ranks with the same clock have in common."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


def best_offset(rounds: Sequence[tuple[float, float, float]]) -> Offset:
    """Return the offset from (asked, their time, answered) of some round trips."""
    asked, theirs, answered = min(rounds, key=lambda trip: trip[2] - trip[0])
    return Offset(theirs - (asked + answered) / 2, (answered - asked) / 2)


def clock_offsets(comm: Communicator, kernels: Sequence[str]) -> dict[str, Offset]:
    """Return each host's offset by its name, on rank 0; every rank calls this at once."""
    offsets = {kernels[0]: Offset(0.0, 0.0)}
    leaders = {name: kernels.index(name) for name in kernels}
    for name, leader in leaders.items():
        if leader == 0:
            continue
        if comm.rank == 0:
            offsets[name] = best_offset([_ask(comm, leader) for _ in range(ROUNDS)])
        elif comm.rank == leader:
            for _ in range(ROUNDS):
                _answer(comm)
    return offsets


def _ask(comm: Communicator, peer: int) -> tuple[float, float, float]:
    question, theirs = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    asked = time.time()
    sent = comm.send(question, peer)
    comm.receive(theirs, peer).wait()
    answered = time.time()
    sent.wait()
    return asked, float(theirs), answered


def _answer(comm: Communicator) -> None:
    question = torch.zeros(1, dtype=torch.float64)
    comm.receive(question, 0).wait()
    comm.send(torch.tensor([time.time()], dtype=torch.float64), 0).wait()
