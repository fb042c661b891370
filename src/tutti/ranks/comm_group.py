"""`CommGroup`: a communicator's collectives as a model uses them, by rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tutti.comm import Communicator
from tutti.comm.work import Work
from tutti.nn.parallel.groups import Pending


class CommGroup:
    """The collectives of one group, by rows."""

    def __init__(self, comm: Communicator, *, tells_counts: bool = False) -> None:
        self._comm, self._tells_counts = comm, tells_counts
        self.size, self.rank = comm.size, comm.index

    def all_reduce(self, x: Tensor, *, maximum: bool = False) -> Tensor:
        """Return the sum, or the maximum, over the ranks; x may be overwritten."""
        x = x.contiguous()
        self._comm.all_reduce(x, "max" if maximum else "sum").wait()
        return x

    def all_gather(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Return the rows of all ranks."""
        return self.start_all_gather(x, rows).wait()

    def reduce_scatter(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Return this rank's rows of the sum over the ranks."""
        return self._reduce_scatter(x, rows, overwrite=False).wait()

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Give `send[i]` rows to rank i; return the `receive[i]` rows that each rank gave."""
        return self.start_all_to_all(x, send, receive).wait()

    def start_all_reduce(self, x: Tensor) -> Pending:
        """Start a sum over the ranks; x is spent."""
        x = x.contiguous()
        return _Flight(self._comm.all_reduce(x), x)

    def start_all_gather(self, x: Tensor, rows: Sequence[int]) -> Pending:
        """Start gathering the rows of all ranks."""
        out = x.new_empty((sum(rows), *x.shape[1:]))
        return _Flight(self._comm.all_gather(x, out, _elements(rows, x)), out)

    def start_reduce_scatter(self, x: Tensor, rows: Sequence[int]) -> Pending:
        """Start summing over the ranks, for this rank's rows of it; x is spent."""
        return self._reduce_scatter(x, rows, overwrite=True)

    def _reduce_scatter(self, x: Tensor, rows: Sequence[int], *, overwrite: bool) -> Pending:
        out = x.new_empty((rows[self.rank], *x.shape[1:]))
        work = self._comm.reduce_scatter(x, out, _elements(rows, x), overwrite=overwrite)
        return _Flight(work, out)

    def start_all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """Start giving `send[i]` rows to rank i, and taking `receive[i]` from it.

        Where the plan names a program, every rank has to know all counts: they are told first.
        """
        out = x.new_empty((sum(receive), *x.shape[1:]))
        sent = _elements(send, x)
        if self._tells_counts:
            told = self._comm.all_gather(torch.tensor(sent)).wait()
            counts = told.view(self.size, self.size).tolist()
            return _Flight(self._comm.all_to_all(x, out, counts=counts), out)
        received = _elements(receive, x)
        work = self._comm.all_to_all(x, out, send_counts=sent, receive_counts=received)
        return _Flight(work, out)


class _Flight:
    """A tensor that is being filled."""

    def __init__(self, work: Work, tensor: Tensor) -> None:
        self._work, self._tensor = work, tensor

    def wait(self) -> Tensor:
        """Return it when it is there; raise if it failed, naming rank, peer and step."""
        self._work.wait()
        return self._tensor


def _elements(rows: Sequence[int], x: Tensor) -> list[int]:
    width = math.prod(x.shape[1:])
    return [count * width for count in rows]
