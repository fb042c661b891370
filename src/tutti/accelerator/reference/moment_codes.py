"""Moments of an optimizer in 8 bits: a code per element and a scale per block of them.

A block's scale is its largest magnitude, so that the largest element keeps its value. Codes are
spaced as powers: a mean is scale · (code ÷ 127)², with its sign, and a square is
scale · (code ÷ 255)⁴, because small numbers of both still steer a step. A square above zero never
becomes zero: the step would divide by nothing. What was decoded is encoded as it was.
"""

from __future__ import annotations

import torch
from torch import Tensor

MEAN, SQUARE = "mean", "square"
_LEVELS = {MEAN: 127, SQUARE: 255}
_POWERS = {MEAN: 2, SQUARE: 4}
_DTYPES = {MEAN: torch.int8, SQUARE: torch.uint8}


def code_dtype(kind: str) -> torch.dtype:
    """Return what codes of a mean or of a square are kept in."""
    return _DTYPES[kind]


def num_scales(count: int, block: int) -> int:
    """Return how many scales so many elements have."""
    return -(-count // block)


@torch.no_grad()
def encode(kind: str, values: Tensor, codes: Tensor, scales: Tensor, block: int) -> None:
    """Write the codes and scales of a flat vector."""
    count = len(values)
    padded = values.new_zeros(len(scales) * block)
    padded[:count] = values
    blocks = padded.view(-1, block)
    scales.copy_(blocks.abs().amax(1))
    part = blocks.abs() / scales.unsqueeze(1).clamp_min(torch.finfo(scales.dtype).tiny)
    steps = (part.pow_(1.0 / _POWERS[kind]) * _LEVELS[kind]).round_()
    if kind == SQUARE:
        steps = torch.where((steps == 0) & (blocks > 0), 1.0, steps)
    else:
        steps *= blocks.sign()
    codes.copy_(steps.view(-1)[:count])


@torch.no_grad()
def decode(kind: str, codes: Tensor, scales: Tensor, block: int) -> Tensor:
    """Return the numbers that codes stand for, in float32."""
    part = codes.to(torch.float32) / _LEVELS[kind]
    powers = part.abs() * part if kind == MEAN else part.square().square_()
    return powers * scales.repeat_interleave(block)[: len(codes)]
