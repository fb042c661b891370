"""The best constant-utilisation guess: what a prediction has to beat to say anything."""

from __future__ import annotations

import numpy as np

from tutti.cost.arrays import FloatArray


def errors_pct(predicted: FloatArray, measured: FloatArray) -> FloatArray:
    """Return |predicted − measured| ÷ measured, in percent."""
    return 100.0 * np.abs(predicted / measured - 1.0)


def constant_utilisation_pct(ideal_seconds: FloatArray, measured: FloatArray) -> float:
    """Return the mean error of the one utilisation that suits these very rows best.

    It is an oracle: fitted on the rows that it is scored on. The optimum of a mean of |u·x − 1|
    over u lies at one of its kinks, so that trying every row's own utilisation is exact.
    """
    candidates = measured / ideal_seconds
    tried = np.abs(np.outer(candidates, ideal_seconds / measured) - 1.0)
    return float(100.0 * tried.mean(axis=1).min())
