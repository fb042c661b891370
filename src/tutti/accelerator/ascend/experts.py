"""Products of all experts in one kernel of torch_npu.

As documented for torch_npu 7: `npu_grouped_matmul([x], [weight], group_list=…, split_item=3,
group_type=…, group_list_type=1)` with the rows per group on the device; group type 0 splits the
rows of x, 2 the rows that are summed over, which is what the weight's gradient needs. The kernel
has no gradient of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tutti.accelerator.ascend.pointwise import DEVICES
from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.registry import Implementation

ROWS, SUMMED = 0, 2  # group types
ONE_TENSOR = 3  # split item: x and the result are one tensor each
COUNTS = 1  # group list type: rows per group, not where groups end
MOST_GROUPS = 1024


def _product(x: Tensor, weight: Tensor, counts: Tensor, group_type: int) -> Tensor:
    import torch_npu

    y: Tensor = torch_npu.npu_grouped_matmul(
        [x],
        [weight],
        bias=None,
        group_list=counts,
        split_item=ONE_TENSOR,
        group_type=group_type,
        group_list_type=COUNTS,
    )[0]
    return y


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, counts: Tensor, later: WeightGradients | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, counts)
        ctx.later = later
        return _product(x, weight.transpose(1, 2), counts, ROWS)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, counts = ctx.saved_tensors
        gradient, inputs = gradients[0].contiguous(), x.detach()  # leads to no graph

        def of_weight() -> Tensor:
            return _product(gradient.t(), inputs, counts, SUMMED)

        grad_x = _product(gradient, weight, counts, ROWS) if ctx.needs_input_grad[0] else None
        if ctx.later is not None:
            ctx.later.defer(weight, of_weight)
            return grad_x, None, None, None
        return grad_x, of_weight() if ctx.needs_input_grad[1] else None, None, None


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    bias: Tensor | None = None,
    *,
    later: WeightGradients | None = None,
) -> Tensor:
    """Return each run of rows times its expert's weight: x (T, in), weight (E, out, in)."""
    y: Tensor = _Grouped.apply(x.contiguous(), weight, counts.to(torch.int64), later)
    if bias is not None:
        y = y + bias.repeat_interleave(counts, dim=0, output_size=x.shape[0])
    return y


def supports(
    x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None, **_options: Any
) -> str | None:
    """Say why a call is not taken."""
    del bias
    if x.dtype not in (torch.float16, torch.bfloat16) or weight.dtype != x.dtype:
        return "float16 and bfloat16 only"
    if not x.shape[0]:
        return "no rows"
    if len(counts) > MOST_GROUPS:
        return f"at most {MOST_GROUPS} experts"
    return None


IMPLEMENTATIONS = (
    Implementation(
        operator="grouped_linear",
        name="npu",
        function=grouped_linear,
        supports=supports,
        devices=DEVICES,
        needs="torch_npu",
        rank=20,
    ),
)
