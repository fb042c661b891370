"""Products of 8 bits (e4m3), forward and backward, in plain torch.

Every row of an operand is divided by a power of two that brings its largest element near the end of
the range: exact, so that all chips round alike, and nothing overflows. Forward multiplies rows of x
with rows of W. The input's gradient g·W sums over W's rows, each with its own power: that one goes
into g before g is rounded, so that both passes see the same W. The weight's gradient gᵀ·x likewise
sums over x's rows, whose powers go into g before its columns are rounded: what is kept of x between
the passes are 8 bits. Experts' products are the same, run by run. A row that is not finite gets a
scale that is not a number, and so does what is made of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.products import product
from tutti.accelerator.reference.linear import defer_bias

NARROW = torch.float8_e4m3fn
LARGEST_EXPONENT = 8  # of e4m3, whose largest number is 1.75 · 2⁸
MULTIPLE = 16  # of what a product's rows are long, which kernels ask for


class Narrow(NamedTuple):
    """Rows in 8 bits, and what each was divided by."""

    values: Tensor
    scales: Tensor

    def wide(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers that they stand for."""
        return self.values.to(dtype) * self.scales.unsqueeze(-1).to(dtype)


class NarrowRows(NamedTuple):
    """Rows in 8 bits on their way into a product, and the dtype that its results have."""

    values: Tensor
    scales: Tensor
    dtype: torch.dtype

    def wide(self) -> Tensor:
        """Return the numbers that they stand for."""
        return Narrow(self.values, self.scales).wide(self.dtype)


def power_of_two_scales(largest: Tensor) -> Tensor:
    """Return the least powers of two by which so large float32 numbers come into e4m3's range."""
    bits = largest.contiguous().view(torch.int32)
    above = (bits & 0x7FFFFF) > 0x600000  # a mantissa beyond 1.75
    exponent = (bits >> 23) - 127 + above.int() - LARGEST_EXPONENT
    scales = ((exponent.clamp(-126, 126) + 127) << 23).view(torch.float32)
    return torch.where(largest.isfinite(), scales, float("nan"))


def narrowed(rows: Tensor) -> Narrow:
    """Return rows in e4m3, and the power of two that each was divided by."""
    wide = rows.float()
    largest = wide.abs().amax(-1) if rows.shape[-1] else wide.new_zeros(wide.shape[:-1])
    scales = power_of_two_scales(largest)
    return Narrow((wide / scales.unsqueeze(-1)).to(NARROW), scales)


class NarrowProducts(Protocol):
    """How a device multiplies in 8 bits."""

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Narrow, Tensor]:
        """Return x·Wᵀ, the rows of x as they were multiplied, and the scales of W's rows."""

    def backward(self, gradient: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        """Return g·W."""

    def of_weight(self, gradient: Tensor, x: Narrow, dtype: torch.dtype) -> Tensor:
        """Return gᵀ·x."""


class Emulated:
    """Rounds to 8 bits and multiplies in float32 at least."""

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Narrow, Tensor]:
        """Return x·Wᵀ, the rows of x as they were multiplied, and the scales of W's rows."""
        own, other, wide = narrowed(x), narrowed(weight), _sums_in(x)
        return product(own.wide(wide), other.wide(wide).t()).to(x.dtype), own, other.scales

    def backward(self, gradient: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        """Return g·W."""
        own, wide = narrowed(gradient.float() * scales), _sums_in(gradient)
        other = (weight.float() / scales.unsqueeze(-1)).to(NARROW).to(wide)
        return product(own.wide(wide), other).to(gradient.dtype)

    def of_weight(self, gradient: Tensor, x: Narrow, dtype: torch.dtype) -> Tensor:
        """Return gᵀ·x."""
        own, wide = narrowed((gradient.float() * x.scales.unsqueeze(-1)).t()), _sums_in(gradient)
        return product(own.wide(wide), x.values.to(wide)).to(dtype)


def _sums_in(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


class NarrowLinear(torch.autograd.Function):
    """A linear layer of 8-bit products."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        later: WeightGradients | None,
        products: NarrowProducts,
    ) -> Tensor:
        """Return x·Wᵀ + b."""
        y, own, scales = products.forward(x.reshape(-1, x.shape[-1]), weight.detach())
        ctx.save_for_backward(*own, scales)
        ctx.weight, ctx.bias, ctx.later, ctx.products = weight, bias, later, products
        ctx.shape = x.shape
        y = y.view(*x.shape[:-1], weight.shape[0])
        if bias is not None:
            y += bias
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the input's gradient, and the others where they are not left for later."""
        (*kept, scales), weight, bias, later = ctx.saved_tensors, ctx.weight, ctx.bias, ctx.later
        products: NarrowProducts = ctx.products
        rows, x = gradients[0].reshape(-1, weight.shape[0]), Narrow(*kept)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = products.backward(rows, weight.detach(), scales).view(ctx.shape)

        def of_weight(dtype: torch.dtype) -> Tensor:
            if rows.shape[0] % MULTIPLE:  # no kernel sums over so many
                return product(rows.t(), x.wide(rows.dtype)).to(dtype)
            return products.of_weight(rows, x, dtype)

        if later is None:
            grad_weight = of_weight(weight.dtype) if ctx.needs_input_grad[1] else None
            grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
            return grad_x, grad_weight, grad_bias, None, None
        later.defer(
            weight,
            lambda: of_weight(weight.dtype),
            add=lambda total: total.add_(of_weight(total.dtype)),
        )
        if bias is not None:
            defer_bias(later, bias, rows)
        return grad_x, None, None, None, None


def narrow_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, later: WeightGradients | None = None
) -> Tensor:
    """Return x·Wᵀ + b of products in 8 bits, as a chip that has them would."""
    y: Tensor = NarrowLinear.apply(x, weight, bias, later, Emulated())
    return y


# --- experts ---------------------------------------------------------------------------------


class NarrowGroupedProducts(Protocol):
    """How a device multiplies runs of rows, each with its expert's weight, in 8 bits.

    `runs` says in the device's own way which rows are whose.
    """

    def forward(self, x: Tensor, weight: Tensor, runs: Tensor) -> tuple[Tensor, Narrow, Tensor]:
        """Return each row times its expert's weight, the rows of x, the weights' scales (E, N)."""

    def backward(self, gradient: Tensor, weight: Tensor, scales: Tensor, runs: Tensor) -> Tensor:
        """Return the gradient of the rows."""

    def of_weight(self, gradient: Tensor, x: Narrow, runs: Tensor) -> Tensor:
        """Return the gradient of the weights."""


class EmulatedGrouped:
    """Rounds to 8 bits and multiplies one expert after the other; `runs` are its rows."""

    def forward(self, x: Tensor, weight: Tensor, runs: Tensor) -> tuple[Tensor, Narrow, Tensor]:
        """Return each row times its expert's weight, the rows of x, the weights' scales (E, N)."""
        each = x.split(runs.tolist())
        products = [Emulated().forward(run, weight[e]) for e, run in enumerate(each)]
        own = [rows for _, rows, _ in products]
        rows = Narrow(torch.cat([r.values for r in own]), torch.cat([r.scales for r in own]))
        return (
            torch.cat([y for y, *_ in products]),
            rows,
            torch.stack([last for *_, last in products]),
        )

    def backward(self, gradient: Tensor, weight: Tensor, scales: Tensor, runs: Tensor) -> Tensor:
        """Return the gradient of the rows."""
        each = enumerate(gradient.split(runs.tolist()))
        return torch.cat([Emulated().backward(own, weight[e], scales[e]) for e, own in each])

    def of_weight(self, gradient: Tensor, x: Narrow, runs: Tensor) -> Tensor:
        """Return the gradient of the weights."""
        sizes = runs.tolist()
        each = zip(gradient.split(sizes), x.values.split(sizes), x.scales.split(sizes), strict=True)
        products = [Emulated().of_weight(g, Narrow(*own), gradient.dtype) for g, *own in each]
        return torch.stack(products)


class NarrowGrouped(torch.autograd.Function):
    """Grouped products of 8 bits."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        runs: Tensor,
        later: WeightGradients | None,
        products: NarrowGroupedProducts,
    ) -> Tensor:
        """Return each row times its expert's weight."""
        y, own, scales = products.forward(x, weight.detach(), runs)
        ctx.save_for_backward(*own, scales, runs)
        ctx.weight, ctx.later, ctx.products = weight, later, products
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the rows' gradient, and the weights' where it is not left for later."""
        (*kept, scales, runs), weight, products = ctx.saved_tensors, ctx.weight, ctx.products
        gradient, x, grad_x, grad_weight = gradients[0].contiguous(), Narrow(*kept), None, None
        if ctx.needs_input_grad[0]:
            grad_x = products.backward(gradient, weight.detach(), scales, runs)
        if ctx.later is not None:
            ctx.later.defer(weight, lambda: products.of_weight(gradient, x, runs))
        elif ctx.needs_input_grad[1]:
            grad_weight = products.of_weight(gradient, x, runs)
        return grad_x, grad_weight, None, None, None


def narrow_grouped_linear(
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    bias: Tensor | None = None,
    *,
    later: WeightGradients | None = None,
) -> Tensor:
    """Return each run of rows times its expert's weight, of products in 8 bits."""
    y: Tensor = NarrowGrouped.apply(x, weight, counts, later, EmulatedGrouped())
    if bias is not None:
        y = y + bias.repeat_interleave(counts, dim=0, output_size=x.shape[0])
    return y
