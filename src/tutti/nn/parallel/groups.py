"""How a rank stands among others: the groups that a model's collectives run in.

`nn` creates no process groups. Whoever does (the engine, through `comm`) gives a `ParallelContext`
made of `Group`s, each with four collectives on tensors, waited for at once or started and waited
for later; what they mean for gradients is `collectives`' business, what runs beside them
`overlap`'s. `Ranks` puts a context together, `ALONE` is a rank with no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tutti.errors import InputError


class Pending(Protocol):
    """The result of a collective under way."""

    def wait(self) -> Tensor:
        """Return it when it is there."""


class Group(Protocol):
    """Ranks that work on one thing together; `rows` are those of each rank, in order of rank.

    Nobody touches what was given to a started collective until it was waited for. All ranks start
    those of a group in the same order, and wait for them in any.
    """

    @property
    def size(self) -> int:
        """How many ranks."""

    @property
    def rank(self) -> int:
        """The place of this one among them."""

    def all_reduce(self, x: Tensor, *, maximum: bool = False) -> Tensor:
        """Return the sum, or the maximum, over the ranks; x may be overwritten."""

    def all_gather(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Return the rows of all ranks."""

    def reduce_scatter(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Return this rank's rows of the sum over the ranks."""

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Give `send[i]` rows to rank i; return the `receive[i]` rows that each rank gave."""

    def start_all_reduce(self, x: Tensor) -> Pending:
        """Start a sum over the ranks; x is spent."""

    def start_all_gather(self, x: Tensor, rows: Sequence[int]) -> Pending:
        """Start gathering the rows of all ranks."""

    def start_reduce_scatter(self, x: Tensor, rows: Sequence[int]) -> Pending:
        """Start summing over the ranks, for this rank's rows of it; x is spent."""

    def start_all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """Start giving `send[i]` rows to rank i, and taking `receive[i]` from it."""


class ParallelContext(Protocol):
    """The groups of one rank of one replica of a stage."""

    @property
    def tensor(self) -> Group:
        """Ranks that slice the weights."""

    @property
    def sequence_parallel(self) -> bool:
        """Whether they also share out the tokens between sliced layers."""

    @property
    def overlap_chunks(self) -> int:
        """Into how many pieces their products are cut, to run beside the collectives."""

    @property
    def context(self) -> Group:
        """Ranks that share out each sequence."""

    @property
    def experts(self) -> Group:
        """Ranks that share out the experts of a layer."""

    @property
    def expert_counts(self) -> tuple[int, ...]:
        """How many experts each rank of the group holds; empty: all, sliced by tensor ranks."""


class Ready:
    """A result that is there."""

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def wait(self) -> Tensor:
        """Return it."""
        return self._result


class Single:
    """A group of one."""

    size = 1
    rank = 0

    def all_reduce(self, x: Tensor, *, maximum: bool = False) -> Tensor:
        """Return x."""
        del maximum
        return x

    def all_gather(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Return x."""
        del rows
        return x

    def reduce_scatter(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Return x."""
        del rows
        return x

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Return x."""
        del send, receive
        return x

    def start_all_reduce(self, x: Tensor) -> Pending:
        """Return x."""
        return Ready(x)

    def start_all_gather(self, x: Tensor, rows: Sequence[int]) -> Pending:
        """Return x."""
        del rows
        return Ready(x)

    def start_reduce_scatter(self, x: Tensor, rows: Sequence[int]) -> Pending:
        """Return x."""
        del rows
        return Ready(x)

    def start_all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """Return x."""
        del send, receive
        return Ready(x)


class InTurn:
    """A group whose started collectives are waited for at once: nothing runs beside them.

    The same collectives of the same pieces, one after the other: what overlap must equal to the
    bit, and what it is measured against.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.size, self.rank = group.size, group.rank
        self.all_reduce, self.all_gather = group.all_reduce, group.all_gather
        self.reduce_scatter, self.all_to_all = group.reduce_scatter, group.all_to_all

    def start_all_reduce(self, x: Tensor) -> Pending:
        """Return the sum over the ranks."""
        return Ready(self._group.start_all_reduce(x).wait())

    def start_all_gather(self, x: Tensor, rows: Sequence[int]) -> Pending:
        """Return the rows of all ranks."""
        return Ready(self._group.start_all_gather(x, rows).wait())

    def start_reduce_scatter(self, x: Tensor, rows: Sequence[int]) -> Pending:
        """Return this rank's rows of the sum."""
        return Ready(self._group.start_reduce_scatter(x, rows).wait())

    def start_all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """Return the rows that each rank gave."""
        return Ready(self._group.start_all_to_all(x, send, receive).wait())


SINGLE: Group = Single()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """A context put together from groups; what is not given is this rank alone."""

    tensor: Group = SINGLE
    sequence_parallel: bool = False
    overlap_chunks: int = 1
    context: Group = SINGLE
    experts: Group = SINGLE
    expert_counts: tuple[int, ...] = ()


ALONE: ParallelContext = Ranks()


def shares(count: int, ways: int) -> tuple[int, ...]:
    """Return `count` cut into `ways` parts as equal as can be."""
    return tuple(count * (i + 1) // ways - count * i // ways for i in range(ways))


def own_experts(parallel: ParallelContext, num_experts: int) -> range:
    """Return the experts of a layer that this rank holds."""
    counts = parallel.expert_counts
    if not counts:
        return range(num_experts)
    if len(counts) != parallel.experts.size or sum(counts) != num_experts:
        raise InputError(
            f"expert counts {list(counts)}: expected {parallel.experts.size} numbers that sum to "
            f"the layer's {num_experts} experts"
        )
    first = sum(counts[: parallel.experts.rank])
    return range(first, first + counts[parallel.experts.rank])
