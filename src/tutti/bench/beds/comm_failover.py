"""Links and NICs broken under a running job: how long `comm` stands still, and whether bits change.

Ranks reduce the same numbers over and over on a bed. While they do, a link between a leaf and a
spine that carries their bytes is cut or turned into a black hole, or a host loses a NIC; then it is
mended. The longest reduction after a fault, less the usual one, is what the fault cost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tutti.bench.beds.bed_faults import FAULTS, Mend
from tutti.bench.beds.clos_bed import MEGABIT, ClosBed, ClosSpec
from tutti.bench.beds.namespaces import Namespaces
from tutti.launch.secret import Secret, new_secret
from tutti.ranks.standing_processes import StandingRanks

ALLOWED_S = 3.0
KINDS = ("cut", "blackhole", "nic")
_ELEMENTS = 1 << 15
_BROKEN_S, _MENDED_S, _COUNTED_S = 5.0, 2.0, 0.5
_LEAST_BYTES = 20_000  # that a link carries in `_COUNTED_S` to be in use


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverRun:
    """One fault: what broke, and how long the slowest rank stood still."""

    kind: str
    where: str
    stall_s: float
    same_bits: bool

    @property
    def passed(self) -> bool:
        """Whether the job went on in time with the same numbers."""
        return self.same_bits and self.stall_s <= ALLOWED_S


class _FaultBed(Protocol):
    """A bed with ranks on it, one part of which can be broken."""

    homes: list[tuple[int, int]]
    places: list[dict[str, Any]]

    def break_one(self, kind: str, dice: random.Random) -> tuple[str, Mend]:
        """Break something in use; return what, and how to mend it."""

    def close(self) -> None:
        """Remove it."""


class _ClosJob:
    """Two ranks under each of three leaves, four spines above."""

    def __init__(self) -> None:
        self._bed = ClosBed(ClosSpec())
        spec = self._bed.spec
        hosts = [host for host in range(spec.hosts) if host % spec.hosts_per_leaf < 2]
        self.homes = [(self._bed.host(host), 0) for host in hosts]
        self.places = [
            {
                "host": f"host{host}", "wire": (host,), "addresses": (spec.address(host),),
                "bandwidth": spec.host_rate * MEGABIT,
            }
            for host in hosts
        ]  # fmt: skip

    def _carried(self) -> dict[tuple[int, int], int]:
        spec, carried = self._bed.spec, {}
        for leaf in range(spec.leaves):
            for name, sent in _sent(self._bed, self._bed.leaf(leaf)).items():
                if name.startswith("s"):
                    carried[leaf, int(name[1:])] = sent
        return carried

    def break_one(self, kind: str, dice: random.Random) -> tuple[str, Mend]:
        """Break a link that carries the job's bytes up to a spine."""
        before = self._carried()
        time.sleep(_COUNTED_S)
        after = self._carried()
        used = sorted(link for link in after if after[link] - before[link] > _LEAST_BYTES)
        leaf, spine = dice.choice(used)
        links, mend = FAULTS[kind](self._bed, leaf, spine, False)
        return links[0], mend

    def close(self) -> None:
        """Remove the bed."""
        self._bed.close()


class _RailJob:
    """A rank for each of two NICs of four hosts; each may also use the other NIC."""

    def __init__(self) -> None:
        from tutti.bench.emulated_network import BEDS, Bed, address

        spec = BEDS["rails"]
        self._bed = Bed(spec)
        self.homes = self._bed.homes()
        self.places = []
        for rank in range(spec.world):
            host, own = spec.home(rank)[0], spec.rail(rank)
            rails = sorted(range(len(spec.nics[host])), key=lambda rail: (rail != own, rail))
            place = dataclasses.replace(
                spec.place(rank),
                addresses=tuple(address(host, rail) for rail in rails),
                # ranks of one host would share memory and use no NIC between them
                host=f"bed{host}",
            )
            self.places.append(place.to_document())

    def break_one(self, kind: str, dice: random.Random) -> tuple[str, Mend]:
        """Pull the plug of a NIC at its switch."""
        del kind
        host = dice.randrange(len(self._bed.spec.nics))
        rail = dice.randrange(len(self._bed.spec.nics[host]))
        fabric, port = self._bed.holders[0], f"port{host}.{rail}"
        self._bed.inside(fabric, ["ip", "-batch", "-"], [f"link set {port} down"])

        def mend() -> None:
            self._bed.inside(fabric, ["ip", "-batch", "-"], [f"link set {port} up"])

        return f"host {host}, NIC {rail}", mend

    def close(self) -> None:
        """Remove the bed."""
        self._bed.close()


def _sent(bed: Namespaces, holder: int) -> dict[str, int]:
    links = json.loads(bed.inside(holder, ["ip", "-s", "-j", "link"], []))
    return {link["ifname"]: link["stats64"]["tx"]["bytes"] for link in links}


def run_failovers(
    number: int, kinds: tuple[str, ...] = KINDS, connections: int = 1
) -> Iterator[FailoverRun]:
    """Break so many parts in each way, one after the other, under one running job per bed."""
    for makes, own in ((_ClosJob, ("cut", "blackhole")), (_RailJob, ("nic",))):
        wanted = [kind for kind in own if kind in kinds]
        if wanted:
            yield from _faults_of(
                makes, list(itertools.product(wanted, range(number))), connections
            )


def _faults_of(
    makes: Callable[[], _FaultBed], faults: list[tuple[str, int]], connections: int
) -> list[FailoverRun]:
    with contextlib.ExitStack() as stack:
        bed = makes()
        stack.callback(bed.close)
        ranks = StandingRanks(len(bed.homes), bed.homes)
        stack.callback(ranks.close)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o777)
        secret = Secret(new_secret().encode())
        all_ranks = range(len(bed.homes))
        ranks.start(_reduce_until_told, all_ranks, bed.places, str(folder), connections, secret)
        while not (folder / "running").exists():
            time.sleep(0.1)
        time.sleep(_MENDED_S)
        marks = []
        for kind, seed in faults:
            where, mend = bed.break_one(kind, random.Random(f"{kind} {seed}"))
            broken_at = time.monotonic()
            time.sleep(_BROKEN_S)
            mend()
            marks.append((kind, where, broken_at, time.monotonic()))
            time.sleep(_MENDED_S)
        (folder / "stop").touch()
        seen = [ranks.answer(rank) for rank in all_ranks]
    return [_judged(mark, seen) for mark in marks]


def _judged(
    mark: tuple[str, str, float, float], seen: list[list[tuple[float, float, bool]]]
) -> FailoverRun:
    """Return one fault's cost from what every rank saw: (end, seconds, same bits) of each call."""
    kind, where, broken_at, mended_at = mark
    usual = statistics.median(took for calls in seen for _, took, _ in calls)
    # calls that were under way at some time while it was broken
    hit = [
        (took, same)
        for calls in seen
        for end, took, same in calls
        if end > broken_at and end - took < mended_at
    ]
    return FailoverRun(
        kind=kind,
        where=where,
        stall_s=max(took for took, _ in hit) - usual,
        same_bits=all(same for _, same in hit),
    )


def _reduce_until_told(
    rank: int, places: list[dict[str, Any]], folder: str, connections: int, secret: Secret
) -> list[tuple[float, float, bool]]:
    """Reduce the same numbers until rank 0 finds the file `stop`; return how each call went."""
    import torch
    from torch._C._distributed_c10d import FileStore

    from tutti.comm import Settings, connect
    from tutti.comm.choice import Named
    from tutti.comm.places import Place

    comm = connect(
        FileStore(f"{folder}/store", len(places)),
        rank,
        len(places),
        place=Place(**places[rank]),
        settings=Settings(connections=connections, fragment_bytes=1 << 15),
        timeout_s=30.0,
        secret=secret,
    )
    comm.chooser.obey("all_reduce", Named(algorithm="ring"))
    numbers = torch.randn(_ELEMENTS, generator=torch.Generator().manual_seed(rank))
    rounds: list[tuple[float, float, bool]] = []
    first: torch.Tensor | None = None
    while True:
        buffer = numbers.clone()
        buffer[0] = float(rank == 0 and Path(folder, "stop").exists())
        began = time.monotonic()
        comm.all_reduce(buffer).wait()
        ended = time.monotonic()
        first = buffer if first is None else first
        rounds.append((ended, ended - began, torch.equal(first[1:], buffer[1:])))
        if len(rounds) == 3 and not rank:
            Path(folder, "running").touch()
        if buffer[0]:
            comm.close()
            return rounds
