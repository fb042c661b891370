"""Makes weights of 8 and 4 bits out of wide ones: rounded to nearest, nothing is calibrated."""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.accelerator.quantised.weight import QuantisedWeight

KINDS = ("fp8", "int8", "int4")
GROUPS = (128, 64, 32)  # columns of a 4-bit group: the widest that divides
_LARGEST = {"fp8": 448.0, "int8": 127.0}


def group_of(columns: int) -> int | None:
    """Return how many columns share a scale of 4 bits; None: no group divides them."""
    return next((group for group in GROUPS if columns % group == 0), None)


def quantise(weight: Tensor, kind: str) -> QuantisedWeight | None:
    """Return a weight (…, out, in) in fewer bits; None where its columns make no groups.

    fp8 and int8: one scale for each row, the largest number at the end of the range. int4: scale
    and zero for each group of columns, from its smallest and largest number.
    """
    wide = weight.float()
    if kind != "int4":
        scales = (wide.abs().amax(-1, keepdim=True) / _LARGEST[kind]).clamp_min(_TINY)
        scaled = wide / scales
        codes = scaled.to(torch.float8_e4m3fn) if kind == "fp8" else scaled.round().to(torch.int8)
        return QuantisedWeight(codes=codes, scales=scales, zeros=None, block=(1, wide.shape[-1]))
    group = group_of(wide.shape[-1])
    if group is None:
        return None
    parts = wide.unflatten(-1, (-1, group))
    low, high = parts.amin(-1).clamp_max(0), parts.amax(-1).clamp_min(0)
    scales = ((high - low) / 15).clamp_min(_TINY)
    zeros = (-low / scales).round()
    codes = ((parts / scales.unsqueeze(-1)).round() + zeros.unsqueeze(-1)).clamp(0, 15)
    return QuantisedWeight(
        codes=halved(codes.flatten(-2).to(torch.uint8)),
        scales=scales,
        zeros=(zeros - 8).to(torch.int16),
        block=(1, group),
    )


# NF4: quantiles of the normal distribution, scaled to ±1, zero exact (Dettmers et al. 2023)
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
NF4_GROUPS = (64, 32, 16)
INT8_GROUPS = (128, 64, 32, 16)


def frozen(weight: Tensor, kind: str) -> QuantisedWeight | None:
    """Return a weight (…, out, in) that training only reads, in int8 or NF4; None: no groups.

    Groups of columns have a scale each, their largest number: the widest group that divides.
    """
    wide = weight.float()
    groups = NF4_GROUPS if kind == "nf4" else INT8_GROUPS
    group = next((size for size in groups if wide.shape[-1] % size == 0), None)
    if group is None:
        return None
    parts = wide.unflatten(-1, (-1, group))
    largest = parts.abs().amax(-1).clamp_min(_TINY)
    if kind == "int8":
        scales = largest / 127.0
        codes = (parts / scales.unsqueeze(-1)).round().to(torch.int8).flatten(-2)
        return QuantisedWeight(
            codes=codes, scales=scales, zeros=None, block=(1, group), widens=True
        )
    levels = torch.tensor(NF4_LEVELS, device=wide.device)
    between = (levels[1:] + levels[:-1]) / 2
    nearest = torch.bucketize((parts / largest.unsqueeze(-1)).contiguous(), between)
    codes = halved(nearest.flatten(-2).to(torch.uint8))
    return QuantisedWeight(
        codes=codes, scales=largest, zeros=None, block=(1, group), levels=levels, widens=True
    )


_TINY = torch.finfo(torch.float32).tiny  # of a row of zeros


def halved(codes: Tensor) -> Tensor:
    """Return codes 0 to 15 (…, in), two in a byte."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)
