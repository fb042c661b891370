"""`ServingLinks`: one rank's way to the others of its engine, over `comm`.

The cost model chooses the programs of collectives: a plan for serving records none.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tutti.comm import Communicator
from tutti.nn.parallel.groups import Group
from tutti.ranks.comm_group import CommGroup
from tutti.ranks.links import DONE, Handle, Use


class ServingLinks:
    """Messages between stages, and the collectives of their tensor-parallel ranks."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.rank = comm, comm.rank
        self._made: dict[tuple[int, ...], Communicator] = {}

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        channel: str,
    ) -> Handle:
        """Send tensors to ranks and fill tensors from ranks; in order within a channel."""
        if not sends and not receives:
            return DONE
        return self.comm.exchange(
            [(tensor, rank) for rank, tensor in sends],
            [(tensor, rank) for rank, tensor in receives],
            channel=channel,
        )

    def all_reduce(self, ranks: Sequence[int], x: Tensor, *, use: Use = "block") -> Handle:
        """Replace x by its sum over the ranks."""
        del use
        return self._communicator(ranks).all_reduce(x)

    def reduce_scatter(
        self, ranks: Sequence[int], x: Tensor, counts: Sequence[int], out: Tensor
    ) -> Handle:
        """Fill `out` with this rank's part of x, summed over the ranks."""
        return self._communicator(ranks).reduce_scatter(x, out, counts)

    def all_gather(
        self, ranks: Sequence[int], x: Tensor, counts: Sequence[int], out: Tensor
    ) -> Handle:
        """Fill `out` with the elements of each rank."""
        return self._communicator(ranks).all_gather(x, out, counts)

    def group(self, ranks: Sequence[int], *, use: Use = "block") -> Group:
        """Return collectives as a model uses them inside a block."""
        del use
        return CommGroup(self._communicator(ranks))

    def _communicator(self, ranks: Sequence[int]) -> Communicator:
        key = tuple(sorted(ranks))
        if key not in self._made:
            made = self.comm.subgroup(key, "block")
            assert made is not None, "a rank asks for groups that it is in"
            self._made[key] = made
        return self._made[key]
