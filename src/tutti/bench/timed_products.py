"""Products that take declared time and compute nothing, and groups that tell what others cost.

What runs beside what is then measured on a machine that could not compute as fast: the model's own
code runs, messages are real, a product is a wait and its result zeros; what is no product takes no
time. `Silent` takes the messages away, `Clocked` lets them run one after the other and notes how
long each took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tutti.accelerator.devices.emulated import Overrun, wait_until
from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.operators import Operators
from tutti.accelerator.reference.experts import Routing
from tutti.nn.parallel.groups import Group, Pending, Ready, Single

Seconds = Callable[[int, int, int], float]  # of a product (m × k)·(k × n)


class TimedOperators:
    """Operators whose products wait; what else a block has passes its input on."""

    def __init__(self, operators: Operators, seconds: Seconds) -> None:
        self._operators, self._seconds = operators, seconds
        self.overrun = Overrun()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operators, name)

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        later: WeightGradients | None = None,
        may_narrow: bool = False,
    ) -> Tensor:
        """Return zeros of the product's shape, in its time."""
        del bias, may_narrow
        if later is None or not torch.is_grad_enabled():
            return self.product(x, weight.shape[0])
        y: Tensor = _Timed.apply(x, weight, weight.shape[0], self, later)
        return y

    def grouped_linear(
        self,
        x: Tensor,
        weight: Tensor,
        counts: Tensor,
        bias: Tensor | None = None,
        *,
        later: WeightGradients,
        may_narrow: bool = False,
    ) -> Tensor:
        """Return zeros of the shape of all experts' products, in their time."""
        del counts, bias, may_narrow
        y: Tensor = _Timed.apply(x, weight, weight.shape[1], self, later)
        return y

    def rms_norm(self, x: Tensor, *_args: Any, **_options: Any) -> Tensor:
        """Return x."""
        return x.view_as(x)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, *_args: Any, **_options: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the sum, twice."""
        both = x if residual is None else x + residual
        return both.view_as(both), both

    def rotary(self, x: Tensor, *_args: Any, **_options: Any) -> Tensor:
        """Return x."""
        return x.view_as(x)

    def split_rotary(
        self, x: Tensor, *_args: Any, heads: int, kv_heads: int, **_options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the parts of x."""
        q, k, v = x.split([heads, kv_heads, kv_heads], dim=1)
        return q, k, v

    def gated_activation(self, x: Tensor, **_options: Any) -> Tensor:
        """Return the half that is gated."""
        return x.chunk(2, dim=-1)[1].contiguous()

    def attention(self, q: Tensor, *_args: Any, **_options: Any) -> Tensor:
        """Return the queries."""
        return q.contiguous()

    def route(self, logits: Tensor, router: Any, experts_per_token: int, *_args: Any) -> Routing:
        """Send as many tokens to each expert, or nearly."""
        del router
        tokens, experts = logits.shape
        chosen = torch.arange(tokens * experts_per_token, device=logits.device) % experts
        weights = logits[:, :experts_per_token] + 1.0 / experts_per_token
        return Routing(weights, chosen.view(tokens, experts_per_token), logits)

    def product(self, x: Tensor, columns: int) -> Tensor:
        """Return zeros after the time of a product with so many columns."""
        start = time.perf_counter()
        y = x.new_zeros(x.shape[0], columns)
        due = self._seconds(x.shape[0], columns, x.shape[1])
        self.overrun.due_s += due
        self.overrun.late_s += wait_until(start + due)
        return y


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, columns: int, timed: TimedOperators, later: Any
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.timed, ctx.later = weight, timed, later
        return timed.product(x, columns)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x,), timed = gradients, ctx.saved_tensors, ctx.timed

        def of_weight() -> Tensor:
            timed.product(gradient.t(), x.shape[1])
            return torch.zeros_like(ctx.weight)

        ctx.later.defer(ctx.weight, of_weight)
        return timed.product(gradient, x.shape[1]), None, None, None, None


class SilentProducts(Single):
    """A group whose collectives take no time: zeros of the right shape."""

    def __init__(self, group: Group) -> None:
        self.size, self.rank = group.size, group.rank

    def all_gather(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Return zeros."""
        return x.new_zeros((sum(rows), *x.shape[1:]))

    def reduce_scatter(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Return zeros."""
        return x.new_zeros((rows[self.rank], *x.shape[1:]))

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Return from each rank what this one would give itself: counts of rows make sense then."""
        del receive
        own = sum(send[: self.rank])
        return x[own : own + send[self.rank]].repeat(self.size, *[1] * (x.dim() - 1))

    def start_all_gather(self, x: Tensor, rows: Sequence[int]) -> Pending:
        """Return zeros."""
        return Ready(self.all_gather(x, rows))

    def start_reduce_scatter(self, x: Tensor, rows: Sequence[int]) -> Pending:
        """Return zeros."""
        return Ready(self.reduce_scatter(x, rows))

    def start_all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """Return zeros."""
        del send
        return Ready(x.new_zeros((sum(receive), *x.shape[1:])))


class Clocked:
    """A group whose collectives run one after the other, each with its seconds."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.size, self.rank = group.size, group.rank
        self.seconds: list[float] = []

    def _timed(self, call: Callable[[], Tensor]) -> Tensor:
        start = time.perf_counter()
        product = call()
        self.seconds.append(time.perf_counter() - start)
        return product

    def all_reduce(self, x: Tensor, *, maximum: bool = False) -> Tensor:
        """Return the sum, or the maximum, over the ranks."""
        return self._timed(lambda: self._group.all_reduce(x, maximum=maximum))

    def all_gather(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Return the rows of all ranks."""
        return self._timed(lambda: self._group.all_gather(x, rows))

    def reduce_scatter(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Return this rank's rows of the sum over the ranks."""
        return self._timed(lambda: self._group.reduce_scatter(x, rows))

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Return the rows that each rank gave."""
        return self._timed(lambda: self._group.all_to_all(x, send, receive))

    def start_all_reduce(self, x: Tensor) -> Pending:
        """Return the sum over the ranks."""
        return Ready(self._timed(lambda: self._group.start_all_reduce(x).wait()))

    def start_all_gather(self, x: Tensor, rows: Sequence[int]) -> Pending:
        """Return the rows of all ranks."""
        return Ready(self._timed(lambda: self._group.start_all_gather(x, rows).wait()))

    def start_reduce_scatter(self, x: Tensor, rows: Sequence[int]) -> Pending:
        """Return this rank's rows of the sum."""
        return Ready(self._timed(lambda: self._group.start_reduce_scatter(x, rows).wait()))

    def start_all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """Return the rows that each rank gave."""
        return Ready(self._timed(lambda: self._group.start_all_to_all(x, send, receive).wait()))
