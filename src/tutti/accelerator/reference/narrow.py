"""Products of 8 bits (e4m3), forward and for the input's gradient, in plain torch.

Every row of an operand is divided by a power of two that brings its largest element near the end of
the range: exact, so that all chips round alike, and nothing overflows. Forward multiplies rows of x
with rows of W. The input's gradient g·W sums over W's rows, each with its own power: that one goes
into g before g is rounded, so that both passes see the same W. The weight's gradient is a product
of the numbers as they were, and its sum is the one of the wider products. A row that is not finite
gets a scale that is not a number, and so does what is made of it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.products import product
from tutti.accelerator.reference.linear import defer_products

NARROW = torch.float8_e4m3fn
LARGEST_EXPONENT = 8  # of e4m3, whose largest number is 1.75 · 2⁸


def power_of_two_scales(largest: Tensor) -> Tensor:
    """Return the least powers of two by which so large float32 numbers come into e4m3's range."""
    bits = largest.contiguous().view(torch.int32)
    above = (bits & 0x7FFFFF) > 0x600000  # a mantissa beyond 1.75
    exponent = (bits >> 23) - 127 + above.int() - LARGEST_EXPONENT
    scales = ((exponent.clamp(-126, 126) + 127) << 23).view(torch.float32)
    return torch.where(largest.isfinite(), scales, float("nan"))


def narrowed(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows in e4m3, and the power of two that each was divided by."""
    wide = rows.float()
    scales = power_of_two_scales(wide.abs().amax(-1))
    return (wide / scales.unsqueeze(-1)).to(NARROW), scales


class NarrowProducts(Protocol):
    """How a device multiplies in 8 bits."""

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return x·Wᵀ, and the scales of W's rows."""

    def backward(self, gradient: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        """Return g·W."""


class Emulated:
    """Rounds to 8 bits and multiplies in float32 at least."""

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return x·Wᵀ, and the scales of W's rows."""
        (own, own_scales), (other, scales) = narrowed(x), narrowed(weight)
        y = product(_wide(own, x, own_scales), _wide(other, x, scales).t())
        return y.to(x.dtype), scales

    def backward(self, gradient: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        """Return g·W."""
        own, own_scales = narrowed(gradient.float() * scales)
        other = weight.float() / scales.unsqueeze(-1)
        found = product(_wide(own, gradient, own_scales), _wide(other.to(NARROW), gradient))
        return found.to(gradient.dtype)


def _wide(narrow: Tensor, like: Tensor, scales: Tensor | None = None) -> Tensor:
    wide = narrow.to(torch.promote_types(like.dtype, torch.float32))
    return wide if scales is None else wide * scales.unsqueeze(-1)


class NarrowLinear(torch.autograd.Function):
    """A linear layer of 8-bit products; the weight's gradient is one of the dtype's own."""

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
        y, scales = products.forward(x.reshape(-1, x.shape[-1]), weight.detach())
        ctx.save_for_backward(x, scales)
        ctx.weight, ctx.bias, ctx.later, ctx.products = weight, bias, later, products
        y = y.view(*x.shape[:-1], weight.shape[0])
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the input's gradient, and the others where they are not left for later."""
        (x, scales), weight, bias, later = ctx.saved_tensors, ctx.weight, ctx.bias, ctx.later
        rows = gradients[0].reshape(-1, weight.shape[0])
        columns = x.reshape(-1, x.shape[-1])
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.products.backward(rows, weight.detach(), scales).view(x.shape)
        if later is None:
            grad_weight = product(rows.t(), columns) if ctx.needs_input_grad[1] else None
            grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
            return grad_x, grad_weight, grad_bias, None, None
        defer_products(later, weight, bias, rows, columns)
        return grad_x, None, None, None, None


def narrow_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, later: WeightGradients | None = None
) -> Tensor:
    """Return x·Wᵀ + b of products in 8 bits, as a chip that has them would."""
    y: Tensor = NarrowLinear.apply(x, weight, bias, later, Emulated())
    return y
