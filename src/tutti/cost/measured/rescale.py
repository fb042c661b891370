"""A profile brought up to date by what a training run took.

The rule: operators of the forward pass are scaled by measured ÷ predicted seconds of the run's
forward instructions (with those that compute again), operators of the backward pass by that of its
backward instructions, and the optimizer's by that of its updates. So the ratios between shapes stay
as they were measured one by one, and their sums are what the run took. Links stay as they are: what
a run waits for on the network is mostly other ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from tutti.hardware.profile import OperatorTime, Profile

OPTIMIZER = ("adamw",)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassFactors:
    """Measured over predicted seconds; one where a run has no such instruction."""

    forward: float = 1.0
    backward: float = 1.0
    optimizer: float = 1.0

    def of(self, row: OperatorTime) -> float:
        """Return the factor of an operator's pass."""
        operator, _, direction = row.operator.partition(".")
        if operator in OPTIMIZER:
            return self.optimizer
        return self.forward if direction in ("", "forward", "inference") else self.backward


def rescaled(profile: Profile, factors: PassFactors, *, why: str, date: str) -> Profile:
    """Return the profile with its operators scaled; `why` joins what it says of its origin."""
    rows = []
    for row in profile.operators:
        factor = factors.of(row)
        rows.append(replace(row, seconds=row.seconds * factor, issue_s=row.issue_s * factor))
    return replace(profile, operators=tuple(rows), origin=f"{profile.origin}; {why}", date=date)


def reissued(
    profile: Profile, factors: PassFactors, operators: Collection[str] | None = None
) -> Profile:
    """Return the profile with the host's times to issue (some) operators scaled, nothing else."""

    def is_meant(operator: str) -> bool:
        return operator not in OPTIMIZER if operators is None else operator in operators

    rows = [
        replace(row, issue_s=row.issue_s * factors.of(row))
        if is_meant(row.operator.partition(".")[0])
        else row
        for row in profile.operators
    ]
    return replace(profile, operators=tuple(rows))
