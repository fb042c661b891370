"""What the engine needs of whoever moves data between ranks: a protocol.

`CommLinks` is the real one; tests put threads of one process in its place. All calls are
asynchronous, and all ranks of a group make those of one use in the same order. What a collective is
for (`use`) tells which of the Plan's collective programs runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from torch import Tensor

from tutti.nn.parallel.groups import Group

Use = Literal["gradients", "parameters", "scalars", "boundary", "block"]
"""What a collective is for; "block": inside a block of the model, as part of its duration."""


class Handle(Protocol):
    """Something under way."""

    def wait(self) -> None:
        """Return when it is done; raise if it failed, naming rank, peer and step."""


class Links(Protocol):
    """Messages and collectives among ranks."""

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        channel: str,
    ) -> Handle:
        """Send tensors to ranks and fill tensors from ranks; in order within a channel."""

    def all_reduce(self, ranks: Sequence[int], x: Tensor, *, use: Use = "gradients") -> Handle:
        """Replace x by its sum over the ranks."""

    def reduce_scatter(
        self, ranks: Sequence[int], x: Tensor, counts: Sequence[int], out: Tensor
    ) -> Handle:
        """Fill `out` with this rank's `counts[i]` elements of the gradients x, summed over ranks.

        x is spent: it may hold partial sums afterwards.
        """

    def all_gather(
        self, ranks: Sequence[int], x: Tensor, counts: Sequence[int], out: Tensor
    ) -> Handle:
        """Fill `out` with the `counts[i]` elements (of parameters) of each rank."""

    def group(self, ranks: Sequence[int], *, use: Use = "block") -> Group:
        """Return collectives as a model uses them inside a block."""


class Done:
    """Nothing to wait for."""

    def wait(self) -> None:
        """Return at once."""


DONE = Done()


class Then:
    """Handles, and what is done when all of them are."""

    def __init__(self, handles: Sequence[Handle], finish: Callable[[], None] | None = None) -> None:
        self._handles, self._finish = list(handles), finish

    def wait(self) -> None:
        """Wait for all, then finish; once."""
        for handle in self._handles:
            handle.wait()
        finish, self._finish, self._handles = self._finish, None, []
        if finish is not None:
            finish()
