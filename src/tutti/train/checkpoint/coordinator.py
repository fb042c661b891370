"""What saving needs of the ranks together: two calls, over a group of their own.

A save in the background talks while training does; on the group that training uses the two would
take each other's messages. Values are what JSON can say, so that lists may come as tuples went.
Tests put threads in the processes' place.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from tutti.comm import Communicator

T = TypeVar("T")


class Coordinator(Protocol):
    """The ranks of a job; all of them make the same calls in the same order."""

    rank: int
    size: int

    def gather(self, value: Any) -> list[Any] | None:
        """Return everybody's value by rank, on rank 0; None on the others."""

    def broadcast(self, value: T | None) -> T:
        """Return rank 0's value on every rank."""


class Alone:
    """One process."""

    rank, size = 0, 1

    def gather(self, value: Any) -> list[Any] | None:
        """Return the value."""
        return [value]

    def broadcast(self, value: T | None) -> T:
        """Return the value."""
        assert value is not None
        return value


class Processes:
    """All ranks of a communicator, through a group that nothing else uses."""

    def __init__(
        self, comm: Communicator, timeout_s: float = 1800.0, *, name: str = "saving"
    ) -> None:
        """Make the group: every rank must do so at the same point."""
        self.communicator = comm.control(name, timeout_s)
        self.rank, self.size = comm.rank, comm.size

    def gather(self, value: Any) -> list[Any] | None:
        """Return everybody's value on rank 0."""
        return self.communicator.gather_values(value, root=0)

    def broadcast(self, value: T | None) -> T:
        """Return rank 0's value."""
        sent: T = self.communicator.broadcast_value(value, 0)
        assert sent is not None
        return sent
