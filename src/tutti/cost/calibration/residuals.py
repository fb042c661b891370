"""How far constants are off on rows like their own: every row predicted by a fit of the others."""

from __future__ import annotations

import math

import numpy as np

from tutti.cost.arrays import FloatArray
from tutti.cost.calibration.fit import fit
from tutti.cost.calibration.intervals import SHARE
from tutti.cost.calibration.splits import MOST_ROWS, splits
from tutti.cost.calibration.stacks import Stack
from tutti.cost.calibration.table import RunTable


def unseen_residuals(stack: Stack, table: RunTable, factors: FloatArray) -> FloatArray:
    """Return ln(predicted ÷ measured) of rows, each by a fit that saw nothing of its cell."""
    residuals: list[FloatArray] = []
    for split in splits(table, MOST_ROWS):
        if len(split.calibrate) and len(split.score):
            fitted = fit(stack, table.take(split.calibrate), factors[split.calibrate])
            scored = table.take(split.score)
            seconds = fitted.predict(scored) * factors[split.score]
            residuals.append(np.log(seconds / scored.measured))
    return np.concatenate(residuals) if residuals else np.zeros(0)


def least_half_width(residuals: FloatArray) -> float | None:
    """Return what 8 of 10 further rows stay within; None where there are too few rows to tell.

    Of n rows and one more, each is as likely as any other to be the k-th farthest off: the
    ⌈0.8·(n + 1)⌉-th of those that are known holds with that probability (split conformal
    prediction; Vovk, Gammerman & Shafer 2005).
    """
    count = len(residuals)
    rank = math.ceil(SHARE * (count + 1) - 1e-9)
    if rank > count:
        return None
    return float(np.sort(np.abs(residuals))[rank - 1])
