"""How far a result may be from the float64 reference: one rule, stated once, for every case.

Both sides get the same inputs, already rounded to the dtype, so that only the operator's own
roundings differ. A result goes through a chain of roundings to its dtype, and its longest sum of
k terms runs in float32 at least; independent rounding errors grow with √k. Relative to the size
of the result, the error is then about

    roundings · u(dtype) + √k · u(dtype of sums),        u: unit roundoff

An exponential of e turns a rounding of its argument into e of them: it counts as e² terms.
`ROUNDINGS` is how many roundings to the dtype a chain may have: the longest plain-torch chain
(softmax attention, backward) has eight, and they add up as a random walk or better. It bounds the
root mean square over the tensor; a single element may be `PEAK` times further off (the largest of
10⁶ normal deviates is 5 deviations out). Where terms cancel, nothing relative can be promised:
inputs and incoming gradients are drawn with unit variance, so the terms are of the order of one,
and an error is never measured against less than that (`FLOOR`).
"""

from __future__ import annotations

import math

import torch

ROUNDINGS = 4.0
PEAK = 8.0
FLOOR = 1.0

UNIT_ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
DTYPES = tuple(UNIT_ROUNDOFF)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums run."""
    return torch.promote_types(dtype, torch.float32)


def bound(dtype: torch.dtype, terms: int) -> float:
    """Return the relative error that a result of a dtype may have, its longest sum being known."""
    return ROUNDINGS * UNIT_ROUNDOFF[dtype] + math.sqrt(terms) * UNIT_ROUNDOFF[wide(dtype)]
