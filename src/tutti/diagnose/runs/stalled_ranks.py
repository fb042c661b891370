"""Who hangs in an elastic run, from what its agents saw of ranks that did not move. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tutti.diagnose.finding import Component, Evidence, Finding, Where
from tutti.diagnose.runs.live_hang import Hang, Observed, Reason, find_hang, stray_of
from tutti.diagnose.runs.recorded_hang import step_seconds
from tutti.observe.ring import RingReading
from tutti.observe.stalled_ranks import Still

_LEAST_S = 2.0  # nothing moved for so long, or
_STEPS = 5.0  # for so many steps
_NOW_NS = 1 << 60  # ages count, not times
_COMPONENTS = {
    Reason.STOPPED: Component.HOST,
    Reason.LOCK: Component.SOFTWARE,
    Reason.STRAY: Component.SOFTWARE,
    Reason.CIRCLE: Component.NETWORK,
    Reason.DATA: Component.STORAGE,
    Reason.FILE: Component.STORAGE,
    Reason.ASLEEP: Component.SOFTWARE,
    Reason.IDLE: Component.UNDETERMINED,
}
_REMEDIES = {
    Reason.STOPPED: "let it go on (kill -CONT), or end it; who stopped it may be in dmesg",
    Reason.LOCK: "py-spy dump --native shows the call that holds the interpreter",
    Reason.STRAY: "call collectives of your own on all ranks, at the same place",
    Reason.CIRCLE: "test the links between the hosts (`tutti comm bench`)",
    Reason.DATA: "look at the storage of the training data (`tutti profile --storage`)",
    Reason.FILE: "look at that file and the file system that it is on",
}
_SURE, _LIKELY = 0.85, 0.6


def diagnose_still(ranks: Sequence[Still], rings: Sequence[RingReading]) -> Finding | None:
    """Return who keeps all others waiting; None where the ranks only take their time."""
    words = {ring.rank: [listed.words for listed in ring.instructions] for ring in rings}
    observed = [_observed(still, words.get(still.rank, [])) for still in ranks]
    after_s = max(_LEAST_S, _STEPS * step_seconds(rings))
    hang = find_hang(observed, now_ns=_NOW_NS, after_s=after_s)
    return None if hang is None else _finding(hang, ranks)


def _observed(still: Still, words: Sequence[str]) -> Observed:
    at = still.instruction
    return Observed(
        chip=still.chip,
        reading=still.reading(_NOW_NS),
        state=still.state,
        instruction=words[at] if 0 <= at < len(words) else "",
        call=still.call,
        stray=stray_of([name for name, _ in still.operations]) if at >= 0 else "",
    )


def _finding(hang: Hang, ranks: Sequence[Still]) -> Finding:
    still = next(of_rank for of_rank in ranks if of_rank.rank == hang.rank)
    others = sorted(ranks, key=lambda of_rank: of_rank.rank != hang.rank)
    component = _COMPONENTS[hang.reason]
    sure = hang.reason in (Reason.STOPPED, Reason.STRAY, Reason.FILE)
    known = component is not Component.UNDETERMINED
    return Finding(
        component=component,
        cause=f"rank {hang.rank} ({hang.chip}) {hang.why}",
        confidence=(_SURE if sure else _LIKELY) if known else 0.0,
        where=Where(ranks=(hang.rank,), hosts=(still.chip.rpartition("/")[0],)),
        evidence=tuple(
            Evidence(file=one.file, line=0, rank=one.rank, text=_words(one)) for one in others[:6]
        ),
        remedy=_REMEDIES.get(hang.reason, ""),
        next_steps=(f"kill -USR2 the process of {hang.chip}: its stack goes to its log",),
    )


def _words(still: Still) -> str:
    parts = [
        f"step {still.step}, instruction {still.instruction}",
        f"idle for {still.idle_s:.1f} s",
    ]
    parts += [f"process {still.state}"] if still.state else []
    parts += [still.call] if still.call else []
    parts += [f"in {name}" for name, _ in still.operations[:2]]
    return "; ".join(parts)
