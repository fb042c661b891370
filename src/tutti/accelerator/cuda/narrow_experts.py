"""Experts' products of 8 bits, all experts in one kernel; their rows stand in order of expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tutti.accelerator.cuda.expert_products import with_bias
from tutti.accelerator.cuda.narrow import narrowed, narrowed_transpose, supports
from tutti.accelerator.cuda.narrow_columns import narrowed_columns, turned
from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.reference.narrow import Narrow, NarrowGrouped
from tutti.accelerator.registry import Implementation


class ScaledGroupedProducts:
    """torch's scaled grouped products; `runs` are where each expert's rows end."""

    def forward(self, x: Tensor, weight: Tensor, runs: Tensor) -> tuple[Tensor, Narrow, Tensor]:
        """Return each row times its expert's weight, the rows of x, the weights' scales (E, N)."""
        own, (other, scales) = narrowed(x), narrowed(weight.flatten(0, 1))
        scales = scales.view(weight.shape[:2])
        other = other.view(weight.shape).transpose(1, 2)
        return _grouped(own.values, other, own.scales, scales, runs, x.dtype), own, scales

    def backward(self, gradient: Tensor, weight: Tensor, scales: Tensor, runs: Tensor) -> Tensor:
        """Return the gradient of the rows."""
        own, own_scales = narrowed(gradient, scales, runs)
        ones = torch.ones(weight.shape[::2], dtype=torch.float32, device=weight.device)
        other = narrowed_transpose(weight, scales).transpose(1, 2)
        return _grouped(own, other, own_scales, ones, runs, gradient.dtype)

    def of_weight(self, gradient: Tensor, x: Narrow, runs: Tensor) -> Tensor:
        """Return the gradient of the weights."""
        (own, own_scales), ends = narrowed_columns(gradient, x.scales, runs)
        assert ends is not None
        other = turned(x.values, runs).t()
        ones = torch.ones(len(runs) * other.shape[1], dtype=torch.float32, device=own.device)
        return _grouped(own, other, own_scales, ones, ends, gradient.dtype)


def _grouped(
    x: Tensor, weight: Tensor, x_scales: Tensor, scales: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    return torch._scaled_grouped_mm(
        x, weight, x_scales, scales, offs=ends, out_dtype=dtype, use_fast_accum=True
    )


def narrow_grouped_linear(
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    bias: Tensor | None = None,
    *,
    later: WeightGradients | None = None,
) -> Tensor:
    """Return each run of rows times its expert's weight, of products in 8 bits."""
    ends = counts.cumsum(0, dtype=torch.int32)
    y: Tensor = NarrowGrouped.apply(x, weight, ends, later, ScaledGroupedProducts())
    return y if bias is None else with_bias(y, bias, ends)


def _supports(
    x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None, **_options: Any
) -> str | None:
    del counts
    if not x.is_contiguous() or not weight.is_contiguous():
        return "contiguous tensors only"
    return supports(x, weight, bias)


IMPLEMENTATIONS = (
    Implementation(
        operator="narrow_grouped_linear", name="scaled_grouped_mm", devices=("cuda",),
        function=narrow_grouped_linear, supports=_supports, rank=20, needs="triton",
    ),
)  # fmt: skip
