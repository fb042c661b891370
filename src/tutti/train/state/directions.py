"""Optimizers that see whole tensors find out, before a step, where it leads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from tutti.accelerator.reference.optimizer import AdamSettings
from tutti.ranks.links import Links
from tutti.ranks.rank_places import Seat, Seats
from tutti.train.state.factored import Factored
from tutti.train.state.matrices import Matrices
from tutti.train.state.state import SpanState


class Directions(Protocol):
    """What all ranks come to between the step's sums and the step."""

    def set_directions(
        self, links: Links, settings: AdamSettings, factor: Tensor, number: int
    ) -> None:
        """Find where the coming step leads, which is the `number`-th that counts.

        If another rank is lost meanwhile, the optimizer's states are as they were before.
        """


def directions_of(seats: Seats, seat: Seat, states: Iterable[SpanState]) -> Directions | None:
    """Return what a rank's optimizer finds out, if the job's is one of these."""
    if seats.plan.job.optimizer == "muon":
        return Matrices(seats, seat, states)
    return Factored(seats, seat, states) if seats.plan.job.optimizer == "adafactor" else None
