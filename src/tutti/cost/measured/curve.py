"""Seconds of one operator's pass between the shapes that were measured.

The measurements are divided by a roofline through the best of them; what is left, the logarithm of
a slowdown, is smooth in the logarithms of the sizes and is interpolated there: a Gaussian process
with a Matérn-3/2 kernel, whose reach and noise are those that predict each measurement best from
the others. Beyond the measured box the slowdown of its edge is kept and the roofline carries on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti.cost.arrays import FloatArray

REACHES = (1.0, 2.0, 4.0, 8.0, 16.0)  # octaves over which shapes tell of each other
NUGGETS = (1e-3, 1e-2, 0.1, 0.5)  # the noise's part of the variance
MOST_TRIED = 240  # measurements by which reach and noise are chosen
EDGE = 0.5  # octaves beyond the measured box that still count as inside
_ROOT3 = 3.0**0.5


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """The slowdown over the roofline, by the logarithms of the features."""

    points: FloatArray  # (N, features), log₂
    weights: FloatArray  # (N,)
    mean: float
    reach: float
    expected_error: float  # relative, of a shape predicted from the others

    @classmethod
    def of(cls, points: FloatArray, slowdowns: FloatArray) -> Curve:
        """Fit measurements: features (N, d) in log₂, measured seconds over the roofline's (N,)."""
        values = np.log(slowdowns)
        mean = float(np.mean(values))
        if len(values) < 3:
            return cls(points, np.zeros(len(values)), mean, 1.0, float("nan"))
        tried = np.linspace(0, len(values) - 1, min(MOST_TRIED, len(values))).astype(np.intp)
        errors: dict[tuple[float, float], float] = {}
        some, target = points[tried], values[tried] - float(np.mean(values[tried]))
        apart = _distances(some, some)
        for reach in REACHES:
            kernel = _kernel(apart, reach)
            for nugget in NUGGETS:
                inverse = np.linalg.inv(kernel + nugget * np.eye(len(some)))
                left_out = (inverse @ target) / np.diag(inverse)
                errors[reach, nugget] = float(np.sqrt(np.mean(left_out**2)))
        reach, nugget = min(errors, key=lambda key: (errors[key], key))
        kernel = _kernel(_distances(points, points), reach) + nugget * np.eye(len(points))
        weights: FloatArray = np.asarray(np.linalg.solve(kernel, values - mean), dtype=np.float64)
        return cls(points, weights, mean, reach, float(np.expm1(errors[reach, nugget])))

    @classmethod
    def flat(cls) -> Curve:
        """Return no slowdown anywhere."""
        return cls(np.zeros((1, 1)), np.zeros(1), 0.0, 1.0, 0.0)

    @property
    def low(self) -> FloatArray:
        """The least of each feature."""
        return np.asarray(self.points.min(axis=0))

    @property
    def high(self) -> FloatArray:
        """The most of each feature."""
        return np.asarray(self.points.max(axis=0))

    def clamped(self, points: FloatArray) -> FloatArray:
        """Return the points moved to the edge of the measured box where they are outside."""
        return np.clip(points, self.low, self.high)

    def slowdowns(self, points: FloatArray) -> FloatArray:
        """Return the slowdown over the roofline at points (Q, d) inside the box."""
        kernel = _kernel(_distances(points, self.points), self.reach)
        slowdown: FloatArray = np.exp(self.mean + kernel @ self.weights)
        return slowdown

    def outside(self, points: FloatArray) -> npt.NDArray[np.bool_]:
        """Tell which features (Q, d) are farther from the measured box than counts as inside."""
        return (points < self.low - EDGE) | (points > self.high + EDGE)


def _distances(a: FloatArray, b: FloatArray) -> FloatArray:
    squares = (a * a).sum(1)[:, None] + (b * b).sum(1)[None, :] - 2.0 * (a @ b.T)
    distances: FloatArray = np.sqrt(np.maximum(squares, 0.0))
    return distances


def _kernel(distances: FloatArray, reach: float) -> FloatArray:
    scaled = _ROOT3 / reach * distances
    values: FloatArray = (1.0 + scaled) * np.exp(-scaled)
    return values
