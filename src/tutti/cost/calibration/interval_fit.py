"""Widths of intervals from what the extrapolating judges found, and how many rows they hold.

The 80 % quantile of a squared residual is linear in what is not known (`Widths`): a quantile
regression with coefficients that are not negative, which is a linear program. Each (judge, stack)
weighs as the root of its rows, each row by its expected square. A stack that nobody has seen is one
more draw of few: the widths are scaled so that estimates without a stack hold for that stack. What
is said of a stack's own rows rests on the other stacks alone, scale and all.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti.cost.arrays import FloatArray
from tutti.cost.calibration.intervals import OTHERS, SHARE, Widths
from tutti.cost.constants import registry

CLUSTER, STACK, CHIP = "cluster", "stack", "chip"  # judges that leave more than a regime out
_UNSEEN = (CLUSTER, STACK, CHIP, "narrow", "experts")
_OCTAVES = ("hidden", "sequence_length", OTHERS)
_COLUMNS = (*_UNSEEN, *_OCTAVES)
# Believed before any row is judged. Nobody knows more of what lies beyond than of what lies inside;
# and what constants decide that are not seen is as uncertain as they are, over the share of a step
# that follows each: narrower models wait for the host, 8 bits run at another rate, experts in
# grouped products. The host's shares are those of models up to 1,024 wide by the formulas, without
# a measured time: d ln(step) ÷ d ln(constant), the root of the mean square.
_LEAST_OCTAVE = 0.03
DECIDES = {
    "hidden": {"host_layer_s": 0.67, "host_tp_s": 0.06, "host_head_s": 0.01, "host_step_s": 0.03},
    "narrow": {"fp8_speedup": 0.6},
    "experts": {"moe_gemm_ratio": 0.6},
}
_DEVIATIONS = 1.28  # of a normal variable, within which 8 of 10 lie
_LEAST_SQUARE = 1e-4  # a row weighs no more than one that is 1 % off
_ROUNDS = 3
_DIGITS = 4


class Off(NamedTuple):
    """How far one judged row is off, and what its prediction did not know."""

    judge: str
    stack: str
    cluster: str  # where whole clusters are judged; empty elsewhere
    choice: tuple[str, ...]  # rows of one job
    residual: float  # ln(predicted ÷ measured)
    own: float  # half-width of the fit inside of its rows; 0 where nothing was fitted
    narrow: bool
    experts: bool
    octaves: Mapping[str, float]

    def columns(self) -> list[float]:
        """Return what is not known, as `_COLUMNS` names it."""
        unseen = self.judge in (STACK, CHIP)
        others = sum(count for name, count in self.octaves.items() if name not in _OCTAVES)
        return [
            *(float(self.judge == name) for name in (CLUSTER, STACK, CHIP)),
            float(unseen and self.narrow),
            float(unseen and self.experts),
            *(self.octaves.get(name, 0.0) for name in _OCTAVES[:-1]),
            others,
        ]


class _Owner(NamedTuple):
    """Whose rows are held out together."""

    stack: str
    cluster: str

    def is_apart(self, other: _Owner) -> bool:
        """Tell whether no row of one is a row of the other."""
        both = bool(self.cluster) and bool(other.cluster)
        return self.stack != other.stack or (both and self.cluster != other.cluster)


class _Rows(NamedTuple):
    """Judged rows as arrays."""

    columns: FloatArray
    squares: FloatArray
    own: FloatArray  # squares, too
    weights: FloatArray
    owners: tuple[_Owner, ...]

    @classmethod
    def of(cls, judged: Sequence[Off]) -> _Rows:
        counts = Counter((one.judge, one.stack, one.cluster) for one in judged)
        return cls(
            np.array([one.columns() for one in judged]).reshape(-1, len(_COLUMNS)),
            np.array([one.residual**2 for one in judged]),
            np.array([one.own**2 for one in judged]),
            np.array([counts[one.judge, one.stack, one.cluster] ** -0.5 for one in judged]),
            tuple(_Owner(one.stack, one.cluster) for one in judged),
        )

    def take(self, rows: npt.NDArray[np.intp]) -> _Rows:
        """Return some of the rows."""
        return _Rows(
            self.columns[rows],
            self.squares[rows],
            self.own[rows],
            self.weights[rows],
            tuple(self.owners[i] for i in rows),
        )

    def of_owner(self, owner: _Owner) -> npt.NDArray[np.intp]:
        """Return the rows of a stack, or those of one of its clusters."""
        return np.flatnonzero([one == owner for one in self.owners])

    def without(self, owner: _Owner) -> _Rows:
        """Return the rows that tell nothing of an owner."""
        return self.take(np.flatnonzero([one.is_apart(owner) for one in self.owners]))


def fit_widths(judged: Sequence[Off], origin: str = "") -> Widths:
    """Return the widths that the judged rows tell of."""
    told = _Told(judged)
    squares = told.scaled()
    variances = {
        name: round(float(np.sqrt(square)), _DIGITS)
        for name, square in zip(_COLUMNS, squares, strict=True)
    }
    expected = np.sqrt(told.rows.columns @ squares + told.rows.own)
    return Widths(
        **{name: variances[name] for name in _UNSEEN},
        octave={name: variances[name] for name in _OCTAVES},
        pair=round(_pair(judged, expected), _DIGITS),
        origin=origin,
    )


def held_out_half_widths(judged: Sequence[Off]) -> FloatArray:
    """Return each row's half-width by widths that no row of its stack told of."""
    told, half_widths = _Told(judged), np.zeros(len(judged))
    rows = told.rows
    for owner in told.owners:
        here = rows.of_owner(owner)
        half_widths[here] = np.sqrt(rows.columns[here] @ told.scaled(owner) + rows.own[here])
    return half_widths


class _Told:
    """What judged rows tell of the columns, without some of those who tell it."""

    def __init__(self, judged: Sequence[Off]) -> None:
        self.rows = _Rows.of(judged)
        self.owners = sorted(set(self.rows.owners))
        self._known: dict[frozenset[_Owner], FloatArray] = {}

    def squares(self, *left_out: _Owner) -> FloatArray:
        """Return what is added for each column."""
        key = frozenset(left_out)
        if key not in self._known:
            rows = self.rows
            for owner in key:
                rows = rows.without(owner)
            self._known[key] = _regression(rows)
        return self._known[key]

    def scaled(self, *left_out: _Owner) -> FloatArray:
        """Return the squares, so large that they hold for a stack that did not tell of them.

        Distances are of regimes that many rows of a stack are in: only what is unseen is scaled.
        """
        unseen = len(_UNSEEN)
        ratios, weights = [np.zeros(0)], [np.zeros(0)]
        for owner in self.owners:
            if all(owner.is_apart(other) for other in left_out):
                squares = self.squares(owner, *left_out)
                here = self.rows.take(self.rows.of_owner(owner))
                added = here.columns[:, :unseen] @ squares[:unseen]
                rest = here.squares - here.own - here.columns[:, unseen:] @ squares[unseen:]
                told = np.flatnonzero(added > 0)
                ratios.append(np.maximum(rest[told], 0.0) / added[told])
                weights.append(here.weights[told])
        joined, heavy = np.concatenate(ratios), np.concatenate(weights)
        scale = max(1.0, _quantile(joined, heavy)) if len(joined) else 1.0
        scales: FloatArray = np.array([scale] * unseen + [1.0] * len(_OCTAVES))
        return self.squares(*left_out) * scales


def _believed(column: str) -> float:
    """Return the least that is added for a column."""
    shares = DECIDES.get(column)
    if shares is not None:
        return _DEVIATIONS * math.hypot(*(s * registry()[name].sigma for name, s in shares.items()))
    return _LEAST_OCTAVE if column in _OCTAVES else 0.0


def _regression(rows: _Rows) -> FloatArray:
    """Return the squares that are added for each column."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_matrix, eye, hstack

    count, size = len(rows.squares), len(_COLUMNS)
    least = np.array([_believed(name) ** 2 for name in _COLUMNS])
    if not count:
        return least
    coefficients = least
    matrix = hstack([csr_matrix(rows.columns), eye(count), -eye(count)])
    bounds = [(low, None) for low in least] + [(0.0, None)] * (2 * count)
    expected = np.ones(count)
    for _ in range(_ROUNDS):
        weights = rows.weights / expected
        cost = np.concatenate([np.zeros(size), SHARE * weights, (1 - SHARE) * weights])
        solved = linprog(cost, A_eq=matrix, b_eq=rows.squares - rows.own, bounds=bounds)
        coefficients = np.asarray(solved.x[:size])
        expected = np.maximum(rows.columns @ coefficients + rows.own, _LEAST_SQUARE)
    return coefficients


def _pair(judged: Sequence[Off], half_widths: FloatArray) -> float:
    """Return how far the ratio of two plans for one job is off, over the half-width of one."""
    members: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, one in enumerate(judged):
        members[(one.judge, one.stack, one.choice)].append(i)
    pairs = [
        (one, other) for rows in members.values() for one, other in itertools.combinations(rows, 2)
    ]
    if not pairs:
        return 1.0
    counts = Counter((judged[i].judge, judged[i].stack) for i, _ in pairs)
    ratios = [
        abs(judged[i].residual - judged[j].residual) / max(half_widths[i], half_widths[j])
        for i, j in pairs
    ]
    weights = [counts[judged[i].judge, judged[i].stack] ** -0.5 for i, _ in pairs]
    return _quantile(np.array(ratios), np.array(weights))


def _quantile(values: FloatArray, weights: FloatArray) -> float:
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    at = int(np.searchsorted(reached, SHARE * reached[-1] * (1 - 1e-12)))
    return float(values[order][at])
