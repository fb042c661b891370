"""Hosts in pairs, all at once, round by round: under torchrun, one process per chip, any number.

The first rank of each host takes part for it. Every rank knows all results, so all make the same
confirming round; rank 0 says what they came to.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from tutti.diagnose.cluster.chips import ChipReading
from tutti.diagnose.cluster.rounds import (
    Pair,
    Round,
    Verdicts,
    judge,
    measured_rates,
    pairing_rounds,
    suspects,
)
from tutti.launch.secret import all_here

BYTES = 1 << 25
REPEATS = 5


def join() -> tuple[int, int]:
    """Join the processes that torchrun started; return this one's rank and their number."""
    if all_here(os.environ):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo")
    return distributed.get_rank(), distributed.get_world_size()


def everyones(value: Any) -> list[Any]:
    """Return what every rank has, by rank: plain values, as JSON."""
    count = distributed.get_world_size()
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(count)]
    distributed.all_gather(sizes, torch.tensor([len(own)]))
    most = max(int(size) for size in sizes)
    padded = torch.zeros(most, dtype=torch.uint8)
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in range(count)]
    distributed.all_gather(parts, padded)
    texts = (bytes(one[: int(size)].tolist()) for one, size in zip(parts, sizes, strict=True))
    return [json.loads(text) for text in texts]


def host_of(group: str = "GROUP_RANK") -> str:
    """Return the name of this host; several on one machine are told apart as torchrun does."""
    number = os.environ.get(group, "0")
    return platform.node() if number == "0" else f"{platform.node()}#{number}"


def gather_readings(own: ChipReading) -> list[ChipReading]:
    """Return the readings of all ranks."""
    fields = {name: getattr(own, name) for name in ("name", "kind", "wrong")}
    fields |= {"seconds": dict(own.seconds), "expected": dict(own.expected)}
    return [ChipReading(**one) for one in everyones(fields)]


def check_hosts(
    hosts: Sequence[str],
    *,
    rounds: Sequence[Round] | None = None,
    expected: float | None = None,
    bytes_: int = BYTES,
    repeats: int = REPEATS,
) -> tuple[Verdicts, int]:
    """Measure rounds of pairs; `hosts` names each rank's. Return what they say, and how many.

    `expected` is bytes per second of a pair; without it the median of all pairs stands in.
    """
    names = list(dict.fromkeys(hosts))
    leaders = [hosts.index(name) for name in names]
    planned = list(rounds) if rounds is not None else pairing_rounds(len(names))
    took: dict[Pair, float] = {}
    for pairs in planned:
        took |= _meet(pairs, leaders, bytes_, repeats)
    middle = expected or (statistics.median(took.values()) if took else 1.0)
    wanted = dict.fromkeys(took, middle)
    rates = measured_rates(planned, took, wanted)
    doubted = suspects(len(names), rates)
    again = _meet(doubted.confirming, leaders, bytes_, repeats)
    confirmed = {pair: rate / middle for pair, rate in again.items()}
    return judge(len(names), rates, doubted, confirmed), len(planned) + 1


def _meet(pairs: Round, leaders: Sequence[int], bytes_: int, repeats: int) -> dict[Pair, float]:
    """Let disjoint pairs of hosts exchange at full rate, all at once; return bytes per second."""
    own = distributed.get_rank()
    distributed.barrier()
    rate: tuple[Pair, float] | None = None
    for a, b in pairs:
        if own in (leaders[a], leaders[b]):
            other = leaders[b] if own == leaders[a] else leaders[a]
            rate = ((a, b), _exchange(other, bytes_, repeats))
    rates = [((a, b), value) for (a, b), value in filter(None, everyones(rate))]
    return {
        pair: statistics.median(value for name, value in rates if name == pair)
        for pair in dict.fromkeys(name for name, _ in rates)
    }


def _exchange(other: int, bytes_: int, repeats: int) -> float:
    """Return the bytes per second each way of an exchange, both directions at once."""
    out, into = torch.zeros(bytes_, dtype=torch.uint8), torch.empty(bytes_, dtype=torch.uint8)
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        works = [distributed.isend(out, other), distributed.irecv(into, other)]
        for work in works:
            if work is not None:
                work.wait()
        times.append(time.perf_counter() - began)
    return bytes_ / statistics.median(times[1:])


def leave() -> None:
    """Part from the others."""
    distributed.destroy_process_group()
