"""What the simulator is given: seconds and bytes for every instruction of every class of ranks.

Arrays stand in the order of a class's instructions. `seconds` is how long an instruction occupies
its lane: a pass, a copy, a collective; for a Send the transfer of its slowest rank; for a Receive
what follows the arrival, such as joining tensor-parallel slices. Memory is taken when an
instruction starts and given back when it ends, on top of what always lies there (`static_bytes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti.schedule.schedule import Schedule

FloatArray = npt.NDArray[np.float64]
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassCosts:
    """The figures of one class of ranks, per rank.

    `breakdown` optionally splits the *compute* seconds for reports: either one category code per
    instruction, or a matrix of seconds (instruction × category). Codes and columns refer to
    `StepCosts.categories`; without it, time is split by the kind of instruction. `leaves_node`
    optionally tells which instructions use the NIC of their rank, and so must share it.
    `overlap_slowdown` is the seconds of compute lost per second of a collective beside it.
    """

    seconds: FloatArray
    allocate_bytes: FloatArray
    free_bytes: FloatArray
    static_bytes: float = 0.0
    breakdown: Array | None = None
    leaves_node: Array | None = None
    overlap_slowdown: float = 0.0

    def __post_init__(self) -> None:
        for name in ("seconds", "allocate_bytes", "free_bytes"):
            values = getattr(self, name)
            if values.dtype != np.float64 or values.shape != self.seconds.shape:
                raise ValueError(f"{name}: {values.dtype}{list(values.shape)}; expected float64[n]")
            if not (np.isfinite(values).all() and (values >= 0).all()):
                raise ValueError(f"{name} holds a number that is negative or not finite")
        if self.leaves_node is not None and (
            self.leaves_node.dtype != np.bool_ or self.leaves_node.shape != self.seconds.shape
        ):
            raise ValueError("leaves_node: expected bool[n]")

    @classmethod
    def plain(cls, seconds: FloatArray, static_bytes: float = 0.0) -> ClassCosts:
        """Return costs that take time but no memory beyond the static part."""
        nothing = np.zeros(len(seconds))
        return cls(
            seconds=np.asarray(seconds, dtype=np.float64),
            allocate_bytes=nothing,
            free_bytes=nothing,
            static_bytes=static_bytes,
        )

    def by_category(self, chosen: Array, num_categories: int) -> FloatArray:
        """Return the seconds of the chosen instructions per category of `breakdown`."""
        if self.breakdown is None:
            raise ValueError("these costs carry no breakdown")
        part = self.breakdown[chosen]
        if part.ndim == 2:
            return np.asarray(part.sum(axis=0), dtype=np.float64)
        seconds = np.bincount(part, weights=self.seconds[chosen], minlength=num_categories)
        return seconds.astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepCosts:
    """The figures of all classes, in the order of `Schedule.classes`."""

    classes: tuple[ClassCosts, ...]
    categories: tuple[str, ...] = ()

    def require_match(self, schedule: Schedule) -> None:
        """Raise ValueError unless the arrays fit the schedule's lists."""
        if len(self.classes) != len(schedule.classes):
            raise ValueError(
                f"costs of {len(self.classes)} classes for a schedule of {len(schedule.classes)}"
            )
        for rank_class, costs in zip(schedule.classes, self.classes, strict=True):
            expected = len(rank_class.instructions)
            if len(costs.seconds) != expected:
                raise ValueError(
                    f"{rank_class.name}: {len(costs.seconds)} costs for {expected} instructions"
                )
            if costs.breakdown is not None:
                self._require_breakdown(rank_class.name, costs.breakdown, expected)

    def _require_breakdown(self, name: str, breakdown: Array, expected: int) -> None:
        known = len(self.categories)
        fits = len(breakdown) == expected and (
            breakdown.shape == (expected, known)
            if breakdown.ndim == 2
            else breakdown.dtype.kind in "iu"
            and (expected == 0 or 0 <= breakdown.min() <= breakdown.max() < known)
        )
        if not fits:
            raise ValueError(f"{name}: 'breakdown' does not fit the {known} categories")
