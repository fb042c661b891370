"""What happens to a fleet, and what is done about it: the state machine's letters."""

from __future__ import annotations

from dataclasses import dataclass

from tutti.fleet.request import Allocation, JobRequest, Shape


@dataclass(frozen=True, slots=True)
class Submit:
    """A job comes."""

    time: float
    request: JobRequest


@dataclass(frozen=True, slots=True)
class Finish:
    """A job has done its work."""

    time: float
    job: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """A job is not wanted any more, whether it runs or waits."""

    time: float
    job: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """A job that was told to stop has saved its state and left its chips."""

    time: float
    job: str


@dataclass(frozen=True, slots=True)
class Moved:
    """A job goes on where it was moved to."""

    time: float
    job: str


@dataclass(frozen=True, slots=True)
class Fail:
    """A node is gone."""

    time: float
    node: int


@dataclass(frozen=True, slots=True)
class Repair:
    """A node is back."""

    time: float
    node: int


@dataclass(frozen=True, slots=True)
class Resize:
    """A job is to go on with other shapes."""

    time: float
    job: str
    shapes: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class Paced:
    """The network lets a job's steps take so many times what they take alone."""

    time: float
    job: str
    stretch: float


Event = Submit | Finish | Cancel | Stopped | Moved | Fail | Repair | Resize | Paced


@dataclass(frozen=True, slots=True)
class Start:
    """Start a job here; `seconds` is what it is expected to take."""

    job: str
    allocation: Allocation
    seconds: float


@dataclass(frozen=True, slots=True)
class Wait:
    """A job waits; `until` is what is promised to it, None where nothing is."""

    job: str
    until: float | None


@dataclass(frozen=True, slots=True)
class Preempt:
    """Stop a job at its next checkpoint, in so many seconds."""

    job: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Move:
    """Save a job, start it there; it holds both places meanwhile."""

    job: str
    allocation: Allocation
    seconds: float


@dataclass(frozen=True, slots=True)
class Lost:
    """A node took a job down; it waits again, with the work that was saved."""

    job: str
    saved: float


@dataclass(frozen=True, slots=True)
class Stay:
    """A move has come to nothing: the job goes on where it was."""

    job: str
    allocation: Allocation


Instruction = Start | Wait | Preempt | Move | Lost | Stay
