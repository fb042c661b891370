"""What the parts of a scheduler know of it, and what it and a simulation ask of a network.

`scheduler` is the machine; `network` is the network that knows a fabric.
"""

from __future__ import annotations

from typing import Protocol

from tutti.fleet.chips import Fleet, Grounds
from tutti.fleet.events import Instruction
from tutti.fleet.request import JobRequest, Run
from tutti.fleet.reservations import Promise


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


class Machine(Protocol):
    """A fleet under a policy, seen from its parts."""

    grounds: Grounds
    fleet: Fleet
    network: Network
    running: dict[str, Run]
    promises: list[Promise]

    def stop(self, run: Run, out: list[Instruction]) -> None:
        """Tell a job to stop at its next checkpoint."""


class SolvedNetwork(Network, Protocol):
    """A network that also says what running jobs do to each other."""

    def solve(self, machine: Machine) -> dict[str, float]:
        """Return the stretch of every job for which it has changed."""
