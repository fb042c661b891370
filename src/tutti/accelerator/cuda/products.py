"""Grouped products: all experts' rows in one kernel."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.registry import Implementation


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    bias: Tensor | None = None,
    *,
    later: WeightGradients | None = None,
) -> Tensor:
    """Return each run of rows times its expert's weight; the counts stay on the device."""
    ends = counts.cumsum(0, dtype=torch.int32)
    if later is None or not torch.is_grad_enabled():
        y = torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)
    else:
        y = _LaterGrouped.apply(x, weight, ends, later)
    if bias is None:
        return y
    if importlib.util.find_spec("triton") is None:
        return y + bias.repeat_interleave(counts, dim=0, output_size=x.shape[0])
    from tutti.accelerator.cuda.expert_products import with_bias

    return with_bias(y, bias, ends)


class _LaterGrouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, later: WeightGradients
    ) -> Tensor:
        ctx.save_for_backward(x, ends)
        ctx.weight, ctx.later = weight, later  # the parameter itself
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        (x, ends), weight = ctx.saved_tensors, ctx.weight
        gradient = gradients[0].contiguous()
        ctx.later.defer(weight, lambda: torch._grouped_mm(gradient.t(), x, offs=ends))
        grad_x = torch._grouped_mm(gradient, weight, offs=ends)
        return grad_x, None, None, None


def _supports(
    x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None, **_options: Any
) -> str | None:
    del counts, bias
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return "bfloat16 only"
    if x.shape[1] % 8 or weight.shape[1] % 8:
        return "widths that are multiples of 8 only"
    if not x.numel():
        return "no rows"
    if not x.is_contiguous() or not weight.is_contiguous():
        return "contiguous tensors only"
    return None


IMPLEMENTATIONS = (
    Implementation(
        operator="grouped_linear", name="grouped_mm", function=grouped_linear, devices=("cuda",),
        supports=_supports, rank=20,
    ),
)  # fmt: skip
