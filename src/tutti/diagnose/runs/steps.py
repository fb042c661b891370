"""Slow and irregular steps, from the figures of a run and the rings of its ranks. Pure.

A run is held against its own history (since when are steps slower, and which part of them grew),
its forecast, and its twins: ranks that do the same. A part that grew names the component; bubbles
are what others' lateness leaves behind, and name none.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tutti.diagnose.finding import Component, Evidence, Finding, Where
from tutti.diagnose.slow import deviation, slower_than_twins
from tutti.observe.ring import RingReading
from tutti.observe.ring_export import spans

WARM_UP = 3  # first steps, which pay for what is made once
_LEAST_SIDE = 5  # steps on either side of a change
_LEAST_RATIO = 1.1
_LEAST_DEVIATIONS = 6.0
_IRREGULAR = 1.5
_EXPLAINS = 0.3  # of what a step grew
_NOISES, _APART = (
    4.0,
    2.0,
)  # a part that grew on few ranks: of its noise, of any other part's growth
_PARTS = {
    "compute_s": (Component.CHIP, "computing"),
    "communication_s": (Component.NETWORK, "communication"),
    "data_s": (Component.STORAGE, "waiting for data"),
    "copy_s": (Component.HOST, "copies between host and chip"),
    "other_s": (Component.HOST, "the host's own work"),
}
_REMEDIES = {
    Component.CHIP: "look at the chip's clocks, heat and ECC; `tutti profile` measures it alone",
    Component.NETWORK: "measure the links of this pool (`tutti comm bench`)",
    Component.STORAGE: "measure the file system; more prefetch, or the data on a local disk",
    Component.HOST: "look for other work on the host (CPU, memory pressure)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A line of a run's figures."""

    line: int
    step: int
    seconds: float
    predicted_s: float | None
    pools: Mapping[str, Mapping[str, float]]


def diagnose_steps(
    figures: Sequence[Figure], rings: Sequence[RingReading], file: str
) -> tuple[Finding | None, list[str]]:
    """Return what makes steps slow, if anything does, and notes about them."""
    notes: list[str] = []
    steady = list(figures[WARM_UP:])
    if len(steady) >= 2 * _LEAST_SIDE:
        notes += _irregular(steady) + _forecast(steady)
        if (at := change_point([f.seconds for f in steady])) is not None:
            return _with_rank(_slower(steady, at, file), _twins(rings)), notes
    return _twins(rings), notes


def _with_rank(slower: Finding, twin: Finding | None) -> Finding:
    """Return what grew, with the rank that computes longer than its twins where it is that."""
    if twin is None or slower.component not in {Component.CHIP, Component.UNDETERMINED}:
        return slower
    since = slower.evidence[0].text
    return replace(
        twin, cause=f"{since}: {twin.cause}", confidence=0.85,
        evidence=(*slower.evidence, *twin.evidence), notes=slower.notes,
    )  # fmt: skip


def change_point(seconds: Sequence[float]) -> int | None:
    """Return from where on values are higher for good, if they are; medians of both sides."""
    best, best_at = 0.0, None
    for at in range(_LEAST_SIDE, len(seconds) - _LEAST_SIDE + 1):
        before, after = statistics.median(seconds[:at]), statistics.median(seconds[at:])
        spread = max(deviation(seconds[:at]), deviation(seconds[at:]), 1e-3 * before)
        score = (after - before) / spread * min(at, len(seconds) - at) ** 0.5
        if after > _LEAST_RATIO * before and after - before > 3 * spread and score > best:
            best, best_at = score, at
    return best_at if best > _LEAST_DEVIATIONS else None


def _irregular(steady: Sequence[Figure]) -> list[str]:
    middle = statistics.median(f.seconds for f in steady)
    late = max(
        _IRREGULAR * middle, middle + _LEAST_DEVIATIONS * deviation([f.seconds for f in steady])
    )
    odd = [f for f in steady if f.seconds > late]
    if not odd:
        return []
    lost = sum(f.seconds - middle for f in odd)
    a_day = lost / sum(f.seconds for f in steady) * 24 * 60
    shown = ", ".join(str(f.step) for f in odd[:8]) + (" …" if len(odd) > 8 else "")
    return [f"{len(odd)} irregular steps ({shown}), which cost {a_day:.0f} minutes a day"]


def _forecast(steady: Sequence[Figure]) -> list[str]:
    ratios = [f.seconds / f.predicted_s for f in steady if f.predicted_s]
    if not ratios:
        return []
    return [f"steps take {statistics.median(ratios):.2f}× their forecast"]


def _slower(steady: Sequence[Figure], at: int, file: str) -> Finding:
    before, after = steady[:at], steady[at:]
    old, new = (statistics.median(f.seconds for f in side) for side in (before, after))
    grown = {
        (pool, part): statistics.median(f.pools[pool].get(part, 0.0) for f in after)
        - statistics.median(f.pools.get(pool, {}).get(part, 0.0) for f in before)
        for pool in after[0].pools
        for part in _PARTS
    }
    pool, part = max(grown, key=lambda key: grown[key], default=("", ""))
    says = (
        f"steps take {new / old:.2f}× as long since step {after[0].step} ({old:.3g} → {new:.3g} s)"
    )
    evidence = (Evidence(file=file, line=after[0].line, text=says),)
    lost = (1 - old / new) * 24
    alone = bool(pool) and grown[pool, part] < _EXPLAINS * (new - old)
    if not pool or (alone and not _of_few_ranks(grown, pool, part, before, after)):
        return Finding(component=Component.UNDETERMINED, cause=says + "; no part of them says why",
                       confidence=0.0, evidence=evidence,
                       next_steps=("run with --trace and compare with a step before",))  # fmt: skip
    component, words = _PARTS[part]
    of = (
        f"of some of pool '{pool}' grew, by {grown[pool, part]:.3g} s in the pool's mean"
        if alone
        else f"of pool '{pool}' grew by {grown[pool, part]:.3g} s"
    )
    return Finding(
        component=component,
        cause=f"{says}: {words} {of}",
        confidence=0.6 if alone else 0.7,
        evidence=evidence,
        remedy=_REMEDIES[component],
        notes=(f"costs {lost:.1f} hours a day",),
    )


def _of_few_ranks(
    grown: Mapping[tuple[str, str], float],
    pool: str,
    part: str,
    before: Sequence[Figure],
    after: Sequence[Figure],
) -> bool:
    """Tell whether a part grew on few ranks of a pool, which its mean shows but little.

    Everybody else waits for them: bubbles grow by what the steps do, and no other part does.
    """
    own, waits = ([[f.pools.get(pool, {}).get(name, 0.0) for f in side] for side in (before, after)]
                  for name in (part, "bubble_s"))  # fmt: skip
    noise = max(deviation(own[0]), deviation(own[1])) * (1 / len(before) + 1 / len(after)) ** 0.5
    rest = max((value for key, value in grown.items() if key != (pool, part)), default=0.0)
    late = statistics.median(f.seconds for f in after) - statistics.median(
        f.seconds for f in before
    )
    waited = statistics.median(waits[1]) - statistics.median(waits[0])
    big = grown[pool, part] > max(_NOISES * noise, _APART * rest)
    return big and waited > _EXPLAINS * late


def _twins(rings: Sequence[RingReading]) -> Finding | None:
    """Return a rank that computes longer than those that do the same."""
    twins: dict[tuple[str, ...], dict[int, float]] = defaultdict(dict)
    for ring in rings:
        sums: dict[int, float] = defaultdict(float)
        for span in spans(ring):
            if (
                span.end_ns
                and not span.waits
                and ring.instructions[span.instruction].lane == "compute"
            ):
                sums[span.step] += (span.end_ns - span.begin_ns) / 1e9
        if len(sums) > WARM_UP + 2:  # the oldest step may be cut
            values = [sums[step] for step in sorted(sums)[1:]]
            twins[tuple(one.words for one in ring.instructions)][ring.rank] = statistics.median(
                values
            )
    for group in twins.values():
        apart = slower_than_twins(group)
        if apart:
            rank = max(apart, key=lambda r: apart[r])
            middle = group[rank] / apart[rank]
            ring = next(r for r in rings if r.rank == rank)
            says = f"{group[rank]:.3g} s of computing in a step, twins {middle:.3g} s"
            return Finding(
                component=Component.CHIP,
                cause=f"rank {rank} computes {apart[rank]:.2f}× as long as its twins",
                confidence=0.7,
                where=Where(ranks=(rank,), hosts=(ring.host,)),
                evidence=(
                    Evidence(file=ring.file, line=0, text=says, rank=rank, host=ring.host),
                ),
                remedy=_REMEDIES[Component.CHIP],
            )  # fmt: skip
    return None
