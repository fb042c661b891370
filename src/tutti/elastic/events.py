"""What `Membership` hears, and what it wants done."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tutti.elastic.messages import Order, Report, Source, Status


class Phase(StrEnum):
    """What the job as a whole is doing."""

    WAITING = "waiting"  # for chips
    SETTLING = "settling"  # what the next generation is
    ENTERING = "entering"
    RUNNING = "running"
    LEAVING = "leaving"
    FINISHED = "finished"
    GIVEN_UP = "given up"


# --- events ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Heard:
    """A status came."""

    status: Status


@dataclass(frozen=True, slots=True)
class Silent:
    """A host was not heard of for too long."""

    host: str


@dataclass(frozen=True, slots=True)
class Settled:
    """The answer to `Settle`: the seats of the next generation, each chip's rank."""

    request: int
    ranks: tuple[str, ...]  # chips, by rank
    plan: str
    source: Source


@dataclass(frozen=True, slots=True)
class Unsettled:
    """The answer to `Settle`: with these chips nothing can be done."""

    request: int
    why: str


@dataclass(frozen=True, slots=True)
class WaitedEnough:
    """Chips were waited for as long as allowed."""


@dataclass(frozen=True, slots=True)
class Change:
    """Somebody wants another generation, after the step at hand: a better plan, a newcomer."""

    why: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Chips are to be left, or may be used again: all of a place such as "pool/node"."""

    place: str
    back: bool = False


@dataclass(frozen=True, slots=True)
class Fatal:
    """Something that no restart mends."""

    why: str


Event = Heard | Silent | Settled | Unsettled | WaitedEnough | Change | Drain | Fatal


# --- instructions ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Let an agent have an order."""

    host: str
    order: Order


@dataclass(frozen=True, slots=True)
class Settle:
    """Find the next generation: a plan for these chips, and where its state comes from."""

    request: int
    chips: tuple[str, ...]
    left: tuple[Report, ...]  # of the seats of the last generation that are still there
    last: bool = False  # others were waited for long enough: with these, or not at all


@dataclass(frozen=True, slots=True)
class StartWaiting:
    """Send `WaitedEnough` after the time that the job allows."""

    why: str


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision, for the log."""

    generation: int
    phase: Phase
    why: str


Instruction = Send | Settle | StartWaiting | Decided
