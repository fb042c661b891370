"""Operators on the host whose results for a row have the same bits whatever the other rows are.

A product's kernel, and with it the order in which it adds, changes with the number of rows. Here
rows go through in blocks of one size, the last one filled up with zeros. Attention takes each token
by itself, key by key, so that neither chunks nor pages change it. Of some functions the last few
elements of a tensor are computed by other code than the rest (sigmoid and what is made of it), of
others not (exp, tanh, erf): activations are made of these. What remains (norms, rotary positions)
works row by row in any case.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.paged import compiles, one_token_each
from tutti.accelerator.paged_segments import PagedSegments
from tutti.accelerator.products import linear_product
from tutti.accelerator.reference import pointwise
from tutti.accelerator.registry import Implementation, register
from tutti.models.parts import Activation

BLOCK = 16  # rows


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, later: WeightGradients | None = None
) -> Tensor:
    """Return x·Wᵀ + b, blocks of rows one after the other."""
    del later
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    if weight.shape[0] == 1:  # a vector: kernels for it take rows in groups
        y = (rows * weight).sum(-1, keepdim=True)
        return (y if bias is None else y + bias).view(*x.shape[:-1], 1)
    padded = torch.zeros(-(-count // BLOCK) * BLOCK, x.shape[-1], dtype=x.dtype)
    padded[:count] = rows
    products = [linear_product(block, weight, bias) for block in padded.split(BLOCK)]
    y = torch.cat(products)[:count] if products else x.new_zeros(0, weight.shape[0])
    return y.view(*x.shape[:-1], weight.shape[0])


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    bias: Tensor | None = None,
    *,
    later: WeightGradients | None = None,
) -> Tensor:
    """Return runs of rows times their expert's weight."""
    ends = list(itertools.accumulate(counts.tolist(), initial=0))
    products = [
        linear(x[first:last], weight[expert], None if bias is None else bias[expert], later=later)
        for expert, (first, last) in enumerate(itertools.pairwise(ends))
    ]
    return torch.cat(products)


def _sigmoid(x: Tensor) -> Tensor:
    return 1.0 / (1.0 + torch.exp(-x))


def activation(x: Tensor, *, kind: Activation) -> Tensor:
    """Return the non-linearity of each element."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    match kind:
        case Activation.SILU:
            y = wide * _sigmoid(wide)
        case Activation.GELU:
            y = 0.5 * wide * (1.0 + torch.erf(wide * 0.5**0.5))
        case Activation.GELU_TANH:
            cubic = wide + 0.044715 * (wide * wide * wide)
            y = 0.5 * wide * (1.0 + torch.tanh((2.0 / math.pi) ** 0.5 * cubic))
        case Activation.QUICK_GELU:
            y = wide * _sigmoid(1.702 * wide)
        case _:
            return pointwise.activation(x, kind=kind)
    return y.to(x.dtype)


def gated_activation(
    x: Tensor, *, kind: Activation, alpha: float = 1.702, limit: float = 7.0
) -> Tensor:
    """Return act(gate) · up of x (…, 2·F)."""
    gate, up = x.chunk(2, dim=-1)
    if kind is not Activation.CLAMPED_SWIGLU:
        return activation(gate, kind=kind) * up
    wide = torch.promote_types(x.dtype, torch.float32)
    gate, up = gate.clamp(max=limit).to(wide), up.clamp(-limit, limit).to(wide)
    return ((up + 1) * (gate * _sigmoid(alpha * gate))).to(x.dtype)


def _no_gradient(x: Tensor, **_options: Any) -> str | None:
    return "no gradients" if torch.is_grad_enabled() and x.requires_grad else None


def _no_gradients(x: Tensor, weight: Tensor, *_others: Any, **_options: Any) -> str | None:
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return "no gradients"
    return None


def paged_attention(
    q: Tensor, key_pages: Tensor, value_pages: Tensor, steps: PagedSegments, **options: Any
) -> Tensor:
    """Return (T, H, E): every token by itself."""
    row_t, position_t = steps.rows_and_positions()
    inside = position_t >= 0
    alone = PagedSegments(
        query_starts=torch.arange(q.shape[0] + 1, dtype=torch.int32),
        key_lengths=(position_t + 1).int(),
        tables=steps.tables[row_t],
        page_size=steps.page_size,
        num_queries=q.shape[0],
        most_queries=1,
        most_keys=steps.most_keys,
    )
    out = q.new_zeros(q.shape[0], q.shape[1], value_pages.shape[-1])
    rows = np.flatnonzero(inside.numpy())
    if len(rows):
        one_token_each(out, q, key_pages, value_pages, alone, rows, invariant=True, **options)
    return out


def _supports_paged(
    q: Tensor, key_pages: Tensor, value_pages: Tensor, steps: PagedSegments, **options: Any
) -> str | None:
    if q.shape[0] != steps.num_queries:
        return "no tokens beyond the segments"
    if not compiles(q, key_pages, value_pages, rounded=bool(options.get("slopes_rounded"))):
        return "float32, float64 and bfloat16 without rounded slopes only"
    return None


register(
    Implementation(
        operator="linear", name="invariant", function=linear, devices=("cpu",), rank=-10,
        supports=_no_gradients, exact=False, invariant=True,
    ),
    Implementation(
        operator="grouped_linear", name="invariant", function=grouped_linear, devices=("cpu",),
        rank=-10, supports=_no_gradients, exact=False, asks_host=True, invariant=True,
    ),
    *(
        Implementation(
            operator=name, name="invariant", function=function, devices=("cpu",), rank=-10,
            supports=_no_gradient, exact=False, invariant=True,
        )
        for name, function in (("activation", activation), ("gated_activation", gated_activation))
    ),
    Implementation(
        operator="paged_attention", name="invariant", function=paged_attention, devices=("cpu",),
        rank=-10, supports=_supports_paged, exact=False, asks_host=True, invariant=True,
    ),
)  # fmt: skip
