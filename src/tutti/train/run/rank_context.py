"""What the parts of a running rank know of it: which rank of which job, and whom it tells."""

from __future__ import annotations

from dataclasses import dataclass

from tutti.hardware.topology import Position
from tutti.models.spec import ModelSpec
from tutti.plan.plan import Plan
from tutti.ranks.events import Events
from tutti.ranks.rank_places import Seat, Seats
from tutti.train.run.config import TrainConfig
from tutti.train.run.planning import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """One rank of a job."""

    job: Job
    rank: int
    seat: Seat
    events: Events
    led: bool = False  # by a controller, which writes the figures

    @classmethod
    def of(cls, job: Job, rank: int, events: Events, *, led: bool = False) -> RankContext:
        """Return that of a rank."""
        seat = Seats(job.plan, job.spec)[rank]
        return cls(job=job, rank=rank, seat=seat, events=events, led=led)

    @property
    def config(self) -> TrainConfig:
        """What the job is to do."""
        return self.job.config

    @property
    def plan(self) -> Plan:
        """The job's plan."""
        return self.job.plan

    @property
    def spec(self) -> ModelSpec:
        """The model that is trained."""
        return self.job.spec

    @property
    def position(self) -> Position:
        """The chip of the plan that the rank drives."""
        return self.seat.place.chip

    @property
    def name(self) -> str:
        """What messages call the rank."""
        return f"rank {self.rank} ({self.position})"

    def say(self, text: str) -> None:
        """Tell what the rank is doing."""
        self.events.send("say", text=text)

    def notice(self, text: str) -> None:
        """Tell what happened; it stays above what moves."""
        self.events.send("notice", text=text)

    def warn(self, text: str) -> None:
        """Tell what a person should look at."""
        self.events.send("warning", text=text)
