"""The generations of an elastic run as its log has them: who took part, from what, how it ended.

Pure: decisions in, generations out. A time without training goes from what ended one until the next
one runs; what of that was the fault and what the way back, the phases in between say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tutti.elastic.events import Phase
from tutti.elastic.journal import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A set of chips that trained together."""

    number: int
    entered: float  # seconds since 1970, as all times here
    ran: float | None = None  # when all its ranks trained
    left: float | None = None  # when it was told to end; None: it runs
    step: int | None = None  # the last that was whole when it began
    source: str = ""  # where its state came from, for people
    plan: str = ""
    chips: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()  # chips of the one before that are not in this one
    gained: tuple[str, ...] = ()
    back_s: float | None = None  # from the end of the one before until this one ran
    why: str = ""  # it ended; "" while it runs
    over: str = ""  # how the whole run ended with it: finished, given up


def generations(entries: Sequence[Entry]) -> list[Generation]:
    """Return the generations that a log tells of, in their order."""
    history: list[Generation] = []
    since: float | None = None  # when the training stopped that was there
    for entry in entries:
        if entry.phase == Phase.ENTERING:
            history.append(_entered(entry, history[-1] if history else None))
            continue
        if not history:
            continue  # chips were waited for
        last = history[-1]
        if entry.phase == Phase.RUNNING and last.ran is None and entry.generation == last.number:
            back = None if since is None else entry.at - since
            history[-1], since = replace(last, ran=entry.at, back_s=back), None
        elif entry.phase == Phase.LEAVING:
            since = entry.at if since is None else since
            if last.left is None:
                history[-1] = replace(last, left=entry.at, why=entry.why)
        elif entry.phase in (Phase.FINISHED, Phase.GIVEN_UP):
            ended = entry.at if last.left is None else last.left
            history[-1] = replace(last, left=ended, why=last.why or entry.why, over=entry.phase)
    return history


def _entered(entry: Entry, before: Generation | None) -> Generation:
    chips = entry.ranks or tuple(seat.chip for seat in entry.seats)
    earlier = set(before.chips) if before is not None else set(chips)
    return Generation(
        number=entry.generation, entered=entry.at, step=entry.step, source=entry.why,
        plan=entry.plan, chips=chips,
        lost=tuple(sorted(earlier - set(chips))), gained=tuple(sorted(set(chips) - earlier)),
    )  # fmt: skip


def recoveries(entries: Sequence[Entry]) -> list[float]:
    """Return the seconds without training after each loss that was recovered from."""
    return [one.back_s for one in generations(entries) if one.back_s is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A time in which a job did one thing."""

    begin: float
    end: float
    phase: str
    generation: int


def phases(entries: Sequence[Entry], until: float) -> list[Span]:
    """Return what a job did from its first decision `until` now, without gaps."""
    spans: list[Span] = []
    for number, entry in enumerate(entries):
        last = number + 1 == len(entries)
        ended = entry.phase in (Phase.FINISHED, Phase.GIVEN_UP)
        end = entry.at if ended else until if last else entries[number + 1].at
        if end > entry.at:
            spans.append(Span(
                begin=entry.at, end=end, phase=entry.phase, generation=entry.generation
            ))  # fmt: skip
    return spans
