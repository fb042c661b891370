"""Least squares with a soft-L1 loss on the data and log-normal priors on the constants.

Unknowns are z = ln(value / prior) / sigma, so that a prior is a residual of its own. All points
around one are priced in one call, which is what makes a fit take a second.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

BOUND = 4.0  # sigmas that a constant may leave its prior by
_STEP = 1e-4  # of z, for differences


def solve(
    predict: Callable[[FloatArray], FloatArray],
    measured: FloatArray,
    *,
    noise: float,
    size: int,
    evaluations: int,
) -> tuple[FloatArray, FloatArray]:
    """Return the best z and the Jacobian there; `predict` maps (points, size) to (points, rows)."""
    from scipy.optimize import least_squares

    wanted = np.log(measured)

    def residuals(z: FloatArray) -> FloatArray:
        errors = (np.log(predict(z)) - wanted) / noise
        # The square of this is 2·(√(1 + r²) − 1).
        robust = np.sign(errors) * np.sqrt(2.0 * (np.sqrt(1.0 + errors * errors) - 1.0))
        return np.concatenate([robust, z], axis=-1)

    def jacobian(z: FloatArray) -> FloatArray:
        around = np.concatenate([z[None, :], z[None, :] + _STEP * np.eye(len(z))])
        values = residuals(around)
        slopes: FloatArray = (values[1:] - values[0]).T / _STEP
        return slopes

    solved = least_squares(
        residuals,
        np.zeros(size),
        jac=jacobian,
        method="trf",
        max_nfev=evaluations,
        bounds=(-BOUND, BOUND),
    )
    return np.asarray(solved.x, dtype=np.float64), np.asarray(solved.jac, dtype=np.float64)
