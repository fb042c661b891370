"""Collectives inside a model, each with the one that its gradient needs.

| function    | forward                      | backward                       |
|-------------|------------------------------|--------------------------------|
| `enter`     | all-gather tokens, or none   | reduce-scatter, or all-reduce  |
| `leave`     | reduce-scatter, or all-reduce| all-gather tokens, or none     |
| `own_share` | this rank's share of tokens  | all-gather                     |
| `rejoin`    | all-gather                   | this rank's share              |
| `total`     | all-reduce                   | all-reduce                     |
| `gather`    | all-gather                   | reduce-scatter                 |
| `exchange`  | all-to-all                   | all-to-all the other way       |

`enter` and `leave` stand around a sliced layer; the first form is that of sequence parallelism. A
`Journey` is an exchange in two parts, with something else between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tutti.nn.parallel.groups import Group, ParallelContext, Pending, shares

Step = Callable[[Tensor], Tensor]


class _Pair(torch.autograd.Function):
    """One function forward, another on the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Step, backward: Step) -> Tensor:
        ctx.step = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.step(gradients[0].contiguous()), None, None


def _pair(x: Tensor, forward: Step, backward: Step) -> Tensor:
    y: Tensor = _Pair.apply(x, forward, backward)
    return y


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _summed(group: Group) -> Step:
    return lambda x: group.all_reduce(x.clone())


def _joined(group: Group, rows: Sequence[int]) -> Step:
    return lambda x: group.all_gather(x.contiguous(), rows)


def _shared(group: Group, rows: Sequence[int]) -> Step:
    return lambda x: group.reduce_scatter(x.contiguous(), rows)


def _cut(group: Group, rows: Sequence[int]) -> Step:
    first = sum(rows[: group.rank])
    return lambda x: x[first : first + rows[group.rank]].contiguous()


def enter(x: Tensor, parallel: ParallelContext, num_tokens: int) -> Tensor:
    """Return all tokens, before a layer that is sliced over the tensor-parallel ranks."""
    group = parallel.tensor
    if group.size == 1:
        return x
    if not parallel.sequence_parallel:
        return _pair(x, _same, _summed(group))
    rows = shares(num_tokens, group.size)
    return _pair(x, _joined(group, rows), _shared(group, rows))


def leave(x: Tensor, parallel: ParallelContext) -> Tensor:
    """Return the sum of the ranks' partial results, after a sliced layer: each its own tokens."""
    group = parallel.tensor
    if group.size == 1:
        return x
    if not parallel.sequence_parallel:
        return _pair(x, _summed(group), _same)
    rows = shares(x.shape[0], group.size)
    return _pair(x, _shared(group, rows), _joined(group, rows))


def own_share(x: Tensor, parallel: ParallelContext) -> Tensor:
    """Return this tensor-parallel rank's share of tokens, where it does not have only that."""
    group = parallel.tensor
    if group.size == 1 or parallel.sequence_parallel:
        return x
    rows = shares(x.shape[0], group.size)
    return _pair(x, _cut(group, rows), _joined(group, rows))


def rejoin(x: Tensor, parallel: ParallelContext, num_tokens: int) -> Tensor:
    """Undo `own_share`."""
    group = parallel.tensor
    if group.size == 1 or parallel.sequence_parallel:
        return x
    rows = shares(num_tokens, group.size)
    return _pair(x, _joined(group, rows), _cut(group, rows))


def total(x: Tensor, group: Group) -> Tensor:
    """Return the sum over ranks that each go on computing with it."""
    return x if group.size == 1 else _pair(x, _summed(group), _summed(group))


def gather(x: Tensor, group: Group, rows: Sequence[int]) -> Tensor:
    """Return the rows of all ranks; gradients of all ranks come back."""
    return x if group.size == 1 else _pair(x, _joined(group, rows), _shared(group, rows))


def exchange(x: Tensor, group: Group, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Return the rows that the ranks gave to this one."""
    if group.size == 1:
        return x
    return _pair(
        x,
        lambda rows: group.all_to_all(rows.contiguous(), send, receive),
        lambda rows: group.all_to_all(rows, receive, send),
    )


class Journey:
    """An all-to-all under way: rows leave with `depart` and are there after `arrive`.

    Autograd runs the newest nodes first. So in backward what was computed in between comes after
    the gradients set out from `arrive` and before `depart` waits for them.
    """

    def __init__(self, group: Group, send: Sequence[int], receive: Sequence[int]) -> None:
        self._group, self._send, self._receive = group, send, receive
        self._left: Tensor | None = None
        self._pending: Pending | None = None

    def depart(self, x: Tensor) -> Journey:
        """Give each rank its rows."""
        self._left = x if self._group.size == 1 else _Depart.apply(x, self)
        return self

    def arrive(self) -> Tensor:
        """Return the rows that the ranks gave to this one."""
        assert self._left is not None, "nobody has left"
        left, self._left = self._left, None
        if self._group.size == 1:
            return left
        y: Tensor = _Arrive.apply(left, self)
        return y

    def start(self, x: Tensor, *, back: bool) -> None:
        """Send rows there, or their gradients back."""
        ways = (self._receive, self._send) if back else (self._send, self._receive)
        self._pending = self._group.start_all_to_all(x.contiguous(), *ways)

    def wait(self) -> Tensor:
        """Return what was sent last."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        return pending.wait()


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        journey.start(x, back=False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        del gradients  # they are still under way
        return ctx.journey.wait(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, journey: Journey) -> Tensor:
        ctx.journey, ctx.shape = journey, x.shape
        return journey.wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.journey.start(gradients[0], back=True)
        return gradients[0].new_zeros(()).expand(ctx.shape), None  # `_Depart` has the real ones


def gather_columns(x: Tensor, group: Group, columns: Sequence[int]) -> Tensor:
    """Return the columns of all ranks, without a gradient."""
    if group.size == 1:
        return x
    return group.all_gather(x.detach().t().contiguous(), columns).t()


class SlicedVocabulary:
    """Joins maxima and sums of ranks that each hold a part of the vocabulary."""

    def __init__(self, group: Group, start: int) -> None:
        self.start = start
        self._group = group

    def maximum(self, values: Tensor) -> None:
        """Replace the values by their maximum over the ranks."""
        values.copy_(self._group.all_reduce(values.clone(), maximum=True))

    def total(self, values: Tensor) -> None:
        """Replace the values by their sum over the ranks."""
        values.copy_(self._group.all_reduce(values.clone()))
