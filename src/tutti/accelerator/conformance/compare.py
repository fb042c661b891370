"""Measures how far a result is from its reference, as a part of what is tolerated."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.accelerator.conformance.tolerance import FLOOR, PEAK, bound

IN_8_BITS = "in 8 bits"  # of a result's name: numbers that rows of e4m3 stand for
_STEP = 2.0**-3  # between numbers of e4m3, of their size
_MOVED = 0.04  # root mean square, of the size: where a tenth of many elements is one step off


@dataclass(frozen=True, slots=True)
class Distance:
    """The error of one tensor; above 1 it is more than tolerated."""

    part: float
    detail: str = ""


def distance(name: str, got: Tensor, expected: Tensor, dtype: torch.dtype, terms: int) -> Distance:
    """Return the error of a tensor; `expected` is on the host, float64 or integers."""
    got, expected = got.detach().to("cpu"), expected.detach()
    if got.shape != expected.shape:
        return Distance(math.inf, f"{name} has shape {_shape(got)}, expected {_shape(expected)}")
    if expected.itemsize == 1 and expected.is_floating_point():  # codes
        return _exact(name, got.float(), expected.float())
    if not expected.is_floating_point():
        return _exact(name, got, expected)
    if not got.is_floating_point():
        return Distance(math.inf, f"{name} is {got.dtype}, expected a floating-point dtype")
    if not expected.numel():
        return Distance(0.0)
    if name.endswith(IN_8_BITS):
        return _narrow(name, got.double(), expected)
    return _rounded(name, got.double(), expected, bound(dtype, terms))


def _exact(name: str, got: Tensor, expected: Tensor) -> Distance:
    wrong = (got != expected).flatten().nonzero()
    if not len(wrong):
        return Distance(0.0)
    place = int(wrong[0])
    return Distance(
        math.inf,
        f"{name} differs in {len(wrong)} of {got.numel()} elements; at {_index(place, got)} it is "
        f"{got.flatten()[place]}, expected {expected.flatten()[place]}",
    )


def _rounded(name: str, got: Tensor, expected: Tensor, tolerated: float) -> Distance:
    neither = got.isnan() & expected.isnan()  # a number: that is what was expected
    got, expected = got.masked_fill(neither, 0.0), expected.masked_fill(neither, 0.0)
    size = float(expected.square().mean().sqrt()) + FLOOR
    errors = (got - expected).abs()
    bad = ~torch.isfinite(errors)
    if bad.any():
        place = int(bad.flatten().nonzero()[0])
        return Distance(
            math.inf,
            f"{name} at {_index(place, got)} is {float(got.flatten()[place]):g}, expected "
            f"{float(expected.flatten()[place]):.6g}",
        )
    whole = float(errors.square().mean().sqrt()) / size
    elements = errors / (expected.abs() + size) / PEAK
    place = int(elements.argmax())
    part = max(whole, float(elements.flatten()[place])) / tolerated
    if part <= 1:
        return Distance(part)
    return Distance(
        part,
        f"{name} is off by {whole:.2g} of its size (tolerated {tolerated:.2g}); at "
        f"{_index(place, got)} it is {float(got.flatten()[place]):.6g}, expected "
        f"{float(expected.flatten()[place]):.6g}",
    )


def _narrow(name: str, got: Tensor, expected: Tensor) -> Distance:
    """Return the distance of rows in 8 bits: here and there an element may be a step off.

    What is rounded differs by its own roundings, and so does to which side it is rounded.
    """
    errors = (got - expected).abs()
    size = float(expected.square().mean().sqrt()) + FLOOR * 1e-6
    largest = expected.abs().amax(-1, keepdim=True)
    steps = errors / (_STEP * expected.abs() + 2.0**-16 * largest + 1e-30)
    whole = float(errors.square().mean().sqrt()) / size
    part = max(whole / (_MOVED + got.numel() ** -0.5), float(steps.max()) / 1.01)
    if part <= 1:
        return Distance(part)
    return Distance(part, f"{name} is off by {whole:.2g} of its size, or by more than a step")


def _shape(tensor: Tensor) -> str:
    return f"({', '.join(map(str, tensor.shape))})"


def _index(place: int, tensor: Tensor) -> str:
    index = torch.unravel_index(torch.tensor(place), tensor.shape)
    return f"[{', '.join(str(int(i)) for i in index)}]"
