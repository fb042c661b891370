"""What goes wrong between ranks, in one line that names who, with whom, and where.

A failed collective is useless to debug unless it says which rank is to blame: `peer` is that rank,
`rank` the one that speaks. After the first failure a communicator is over: every later call
answers with the same error.
"""

from __future__ import annotations

from tutti.errors import TuttiError


class CommError(TuttiError):
    """A collective that cannot be finished."""

    def __init__(
        self, message: str, *, rank: int, peer: int | None = None, operation: str = ""
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.peer = peer
        self.operation = operation


class PeerLostError(CommError):
    """A rank died, left, or its connection broke."""


class CommTimeoutError(CommError):
    """A rank did not do its part within the time-out."""


class DisagreementError(CommError):
    """Ranks that were started with different ideas of the job."""


class ClosedError(CommError):
    """A communicator that was closed by its owner."""
