"""Products of experts that have few rows each, for inference: every weight is read once.

A program takes some outputs of one expert; which rows are the expert's is read on the device. An
expert without rows costs the start of its programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tutti.accelerator.cuda.common import DTYPES
from tutti.accelerator.cuda.early import early, wait
from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.registry import Implementation

ROWS = 16  # of a tile: the least that tensor cores take
FEW_ROWS = 8  # of an expert on average: more gain by larger tiles
OUTPUTS, INPUTS, WARPS, STAGES = 64, 128, 4, 4


@triton.jit
def _multiply(
    x, weight, ends, bias, y, x_row, out, width,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write some outputs of an expert's rows."""
    wait(EARLY)
    expert = tl.program_id(1)
    begin, end = 0, tl.load(ends + expert)
    if expert > 0:
        begin = tl.load(ends + expert - 1)
    n, at = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    known = n < out
    line_n = weight + expert.to(tl.int64) * out * width + n.to(tl.int64) * width
    for first in range(begin, end, BM):
        row = (first + tl.arange(0, BM)).to(tl.int64)
        present = row < end
        sum_mn = tl.zeros((BM, BN), tl.float32)
        for start in range(0, width, BK):
            k = start + at
            x_mk = tl.load(
                x + row[:, None] * x_row + k[None, :],
                mask=present[:, None] & (k < width)[None, :], other=0.0,
            )  # fmt: skip
            if EVEN:
                w_nk = tl.load(line_n[:, None] + k[None, :])
            else:
                inside = known[:, None] & (k < width)[None, :]
                w_nk = tl.load(line_n[:, None] + k[None, :], mask=inside, other=0.0)
            sum_mn = tl.dot(x_mk, tl.trans(w_nk), sum_mn, input_precision=PRECISION)
        if HAS_BIAS:
            sum_mn += tl.load(bias + expert * out + n, mask=known, other=0.0).to(tl.float32)
        tl.store(y + row[:, None] * out + n[None, :], sum_mn.to(y.dtype.element_ty),
                 mask=present[:, None] & known[None, :])  # fmt: skip


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    bias: Tensor | None = None,
    *,
    later: WeightGradients | None = None,
) -> Tensor:
    """Return each run of rows times its expert's weight, as the reference does."""
    del later  # there are no gradients
    experts, out, width = weight.shape
    y = x.new_empty(x.shape[0], out)
    wide = x.dtype == torch.float32
    inputs = INPUTS // 2 if wide else INPUTS
    _multiply[(-(-out // OUTPUTS), experts)](
        x, weight, counts.cumsum(0, dtype=torch.int32), bias, y, x.stride(0), out, width, BM=ROWS,
        BN=OUTPUTS, BK=inputs, EVEN=out % OUTPUTS == 0 and width % inputs == 0,
        HAS_BIAS=bias is not None, PRECISION="ieee" if wide else "tf32", num_warps=WARPS,
        num_stages=1 if wide else STAGES, **early(x),
    )  # fmt: skip
    return y


def _supports(
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    bias: Tensor | None = None,
    *,
    later: WeightGradients | None = None,
    **_options: Any,
) -> str | None:
    del counts
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        return "floating-point rows and weights of one dtype only"
    if x.shape[0] > FEW_ROWS * weight.shape[0]:
        return f"more than {FEW_ROWS} rows an expert"
    if not x.numel() or not weight.numel():
        return "no rows"
    if x.stride(1) != 1 or not weight.is_contiguous():
        return "contiguous tensors only"
    trained = any(tensor is not None and tensor.requires_grad for tensor in (x, weight, bias))
    if torch.is_grad_enabled() and (trained or later is not None):
        return "no gradients"
    return None


IMPLEMENTATIONS = (
    # behind torch's until it was timed: `tutti accelerator tune` may choose it
    Implementation(
        operator="grouped_linear", name="few_rows", function=grouped_linear, devices=("cuda",),
        supports=_supports, rank=10, needs="triton",
    ),
)  # fmt: skip
