"""Which rank stopped the others, from the rings of all ranks. Pure.

A rank that waits for an instruction waits for those ranks that have the same operation in their
lists and have not started it. Followed to its end, that is the rank that computes for ever, stands
between two steps, died, or left no ring.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tutti.diagnose.finding import Component, Evidence, Finding, Where, spans
from tutti.diagnose.waits import culprits
from tutti.observe.ring import Kind, RingReading
from tutti.observe.ring_export import Span
from tutti.observe.ring_export import spans as ring_spans

_LEAST_S = 5.0  # nothing happened for so long, or
_STEPS = 5.0  # for so many steps
_MOST_EVIDENCE = 6
_OTHER_SIDE = {"Send": "Receive", "Receive": "Send"}


@dataclass(frozen=True, slots=True)
class _Standing:
    """Where a rank stands at its last event."""

    ring: RingReading
    step: int
    waits: Span | None  # the wait that is not over
    inside: Span | None  # the instruction that was started and not issued
    started: frozenset[int]  # instructions of this step

    def words(self) -> str:
        """Return it as a person would say it."""
        if self.waits is not None:
            return f"waits for {self.ring.instructions[self.waits.instruction].words}"
        if self.inside is not None:
            return f"is in {self.ring.instructions[self.inside.instruction].words}"
        return "is between instructions"


def standing(ring: RingReading) -> _Standing:
    """Return where a rank stands."""
    step = max((event.step for event in ring.events), default=0)
    ended = bool(ring.events) and ring.events[-1].kind is Kind.STEP_END
    open_ = (
        [s for s in ring_spans(ring) if s.end_ns is None and s.step == step] if not ended else []
    )
    started = frozenset(
        e.instruction for e in ring.events if e.step == step and e.kind is Kind.START
    )
    # an operation that the host does by itself is a wait from its start on
    waits = [s for s in open_ if s.waits or ring.instructions[s.instruction].lane == "network"]
    return _Standing(
        ring,
        step + (1 if ended else 0),
        max(waits, key=lambda s: s.begin_ns, default=None),
        max((s for s in open_ if s not in waits), key=lambda s: s.begin_ns, default=None),
        frozenset() if ended else started,
    )


def step_seconds(rings: Sequence[RingReading]) -> float:
    """Return the median step of all ranks but the first, which warms up; 0 where none ended."""
    durations: list[float] = []
    for ring in rings:
        begins = {e.step: e.time_ns for e in ring.events if e.kind is Kind.STEP}
        own = [(e.time_ns - begins[e.step]) / 1e9 for e in ring.events
               if e.kind is Kind.STEP_END and e.step in begins]  # fmt: skip
        durations += own[1:] or own
    return statistics.median(durations) if durations else 0.0


def diagnose_rings(
    rings: Sequence[RingReading], notes: Sequence[str] = (), *, now_ns: int | None = None
) -> Finding | None:
    """Return which rank the others wait for; None where the ranks stand as they should.

    `now_ns` is the time of a run whose processes live, on the wall clock; of one that is over, the
    last moment at which a process was known to live takes its place.
    """
    rings = [ring for ring in rings if ring.events]
    if not rings:
        return None
    stand = {ring.rank: standing(ring) for ring in rings}
    last = max(ring.events[-1].time_ns + ring.clock_ns for ring in rings)
    until = max(ring.alive_ns + ring.clock_ns for ring in rings) if now_ns is None else now_ns
    quiet_s = (until - last) / 1e9
    missing = tuple(r for r in range(rings[0].world) if r not in stand)
    gone = _gone(rings, until)
    if all(s.waits is None and s.inside is None for s in stand.values()) and not missing:
        steps = {s.step for s in stand.values()}
        if len(steps) == 1 or quiet_s < max(_LEAST_S, _STEPS * step_seconds(rings)):
            return None
    if quiet_s < max(_LEAST_S, _STEPS * step_seconds(rings)) and not gone:
        return None
    waits = {rank: _waited_for(rank, stand, missing) for rank, s in stand.items() if s.waits}
    ends = gone or culprits(waits) or tuple(r for r in stand if r not in waits)
    return _finding(ends, stand, waits, quiet_s, (*notes, *_about(missing)), gone)


def _gone(rings: Sequence[RingReading], until: int) -> tuple[int, ...]:
    """Return the ranks whose process ended before those of the others."""
    ages = {ring.rank: (until - ring.alive_ns - ring.clock_ns) / 1e9 for ring in rings}
    gone = tuple(rank for rank, age in ages.items() if age > _LEAST_S)
    return gone if len(gone) < len(rings) else ()


def _about(missing: tuple[int, ...]) -> list[str]:
    return [f"no ring of rank {spans(missing)} in this folder"] if missing else []


def _waited_for(rank: int, stand: Mapping[int, _Standing], missing: tuple[int, ...]) -> set[int]:
    """Return the ranks that take part in what `rank` waits for and have not started it."""
    own = stand[rank]
    if own.waits is None:
        return set()
    listed = own.ring.instructions[own.waits.instruction]
    side = _OTHER_SIDE.get(listed.words.split()[0], "")
    late_ranks = set()
    for other, there in stand.items():
        if other == rank or not listed.meets or there.step > own.step:
            continue
        partners = [
            i for i, one in enumerate(there.ring.instructions)
            if one.meets == listed.meets and (not side or one.words.startswith(side))
        ]  # fmt: skip
        late = there.step < own.step or not all(i in there.started for i in partners)
        if partners and late:
            late_ranks.add(other)
    return late_ranks or set(missing)


def _finding(
    ends: tuple[int, ...],
    stand: Mapping[int, _Standing],
    waits: Mapping[int, set[int]],
    quiet_s: float,
    notes: Sequence[str],
    gone: tuple[int, ...],
) -> Finding:
    if not ends:
        return Finding(
            component=Component.NETWORK, confidence=0.5,
            cause=f"all ranks are in one operation, which has not moved for {quiet_s:.0f} s",
            evidence=_evidence(stand, tuple(stand)), notes=tuple(notes),
            remedy="test the links between the hosts (`tutti comm bench`)",
        )  # fmt: skip
    first = stand.get(ends[0])
    who = ("rank " if len(ends) == 1 else "ranks ") + spans(ends)
    does = "left no ring" if first is None else first.words()
    if gone:
        does = "died or is stopped" + (f" (it {first.words()})" if first else "")
    step = max(s.step for s in stand.values())
    held = sum(1 for others in waits.values() if others)
    cause = (
        f"{who} {does} in step {step}; {held} others wait, nothing has moved for {quiet_s:.0f} s"
    )
    hosts = tuple(dict.fromkeys(stand[r].ring.host for r in ends if r in stand))
    return Finding(
        component=Component.HOST if gone else Component.UNDETERMINED,
        cause=cause,
        confidence=0.6 if gone else 0.0,
        where=Where(ranks=ends, hosts=hosts),
        evidence=_evidence(stand, (*ends, *stand)),
        remedy="read its log and dmesg of its host" if gone else "",
        next_steps=(f"py-spy dump --pid {first.ring.process} on {first.ring.host}",)
        if first and not gone else (),
        notes=tuple(notes),
    )  # fmt: skip


def _evidence(stand: Mapping[int, _Standing], ranks: Sequence[int]) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(file=stand[rank].ring.file, line=stand[rank].ring.events[-1].number, rank=rank,
                 host=stand[rank].ring.host, text=f"step {stand[rank].step}: {stand[rank].words()}")
        for rank in list(dict.fromkeys(r for r in ranks if r in stand))[:_MOST_EVIDENCE]
    )  # fmt: skip
