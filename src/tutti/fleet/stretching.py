"""What a scheduler and a simulation ask of a network; `network` is the one that knows a fabric."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tutti.fleet.request import JobRequest

if TYPE_CHECKING:
    from tutti.fleet.scheduler import Scheduler


class Network(Protocol):
    """What is known of a job's steps on the fabric."""

    def stretch(self, request: JobRequest, mask: int) -> float:
        """Return how many times longer its steps take on these nodes than on a perfect network."""


class Flat:
    """A network in which it does not matter where a job lies."""

    def stretch(self, request: JobRequest, mask: int) -> float:
        """Return 1."""
        del request, mask
        return 1.0


class SolvedNetwork(Network, Protocol):
    """A network that also says what running jobs do to each other."""

    def solve(self, machine: Scheduler) -> dict[str, float]:
        """Return the stretch of every job for which it has changed."""
