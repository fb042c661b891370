"""What saving needs of the ranks together: two calls, over a process group of their own.

A save in the background talks while training does; on the group that training uses the two would
take each other's messages. Tests put threads in the processes' place.
"""

from __future__ import annotations

import datetime
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from tutti.errors import TuttiError

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
    """All processes of torch.distributed, through a group that nothing else uses."""

    def __init__(self, timeout_s: float = 1800.0) -> None:
        """Make the group: every process of the job must do so at the same point."""
        timeout = datetime.timedelta(seconds=timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def gather(self, value: Any) -> list[Any] | None:
        """Return everybody's value on rank 0."""
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        try:
            dist.gather_object(value, found, dst=0, group=self._group)
        except RuntimeError as error:
            raise _lost(error) from None
        return found

    def broadcast(self, value: T | None) -> T:
        """Return rank 0's value."""
        box = [value]
        try:
            dist.broadcast_object_list(box, src=0, group=self._group)
        except RuntimeError as error:
            raise _lost(error) from None
        found = box[0]
        assert found is not None
        return found


def _lost(error: RuntimeError) -> TuttiError:
    first = str(error).splitlines()[0] if str(error) else "no reason given"
    return TuttiError(f"another rank is gone or does not answer ({first})")
