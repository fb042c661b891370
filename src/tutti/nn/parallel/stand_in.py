"""Groups whose other ranks are not there: for measuring what one rank holds, without a network.

Every collective makes the tensors that the real one makes, of the same sizes; what would come from
others is this rank's own. Numbers mean nothing, bytes do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tutti.nn.parallel.groups import Pending, Ready


class StandInGroup:
    """A group of which only one rank exists."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank

    def all_reduce(self, x: Tensor, *, maximum: bool = False) -> Tensor:
        """Return x, as a sum that is made in its place."""
        del maximum
        return x.contiguous()

    def all_gather(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Return so many rows as all ranks have."""
        return _filled(x, sum(rows))

    def reduce_scatter(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Return this rank's rows."""
        return _filled(x, rows[self.rank])

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Return from every rank what this one gives itself, as often as it takes."""
        first = sum(send[: self.rank])
        return _filled(x[first : first + send[self.rank]], sum(receive))

    def start_all_reduce(self, x: Tensor) -> Pending:
        """Return x."""
        return Ready(self.all_reduce(x))

    def start_all_gather(self, x: Tensor, rows: Sequence[int]) -> Pending:
        """Return so many rows as all ranks have."""
        return Ready(self.all_gather(x, rows))

    def start_reduce_scatter(self, x: Tensor, rows: Sequence[int]) -> Pending:
        """Return this rank's rows."""
        return Ready(self.reduce_scatter(x, rows))

    def start_all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """Return from every rank what this one gives itself."""
        return Ready(self.all_to_all(x, send, receive))


def _filled(own: Tensor, count: int) -> Tensor:
    """Return so many rows, this rank's own over and over; zeros where it has none."""
    out = torch.zeros((count, *own.shape[1:]), dtype=own.dtype, device=own.device)
    size = own.shape[0]
    for start in range(0, count if size else 0, max(size, 1)):
        out[start : start + size] = own[: count - start]
    return out
