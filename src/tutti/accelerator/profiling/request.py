"""What a profile is asked for: the cases of a model, of the grid, or of some operators alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from tutti.accelerator.profiling import grid, served_grid
from tutti.accelerator.profiling.cases import ProfileCase
from tutti.errors import InputError, hint
from tutti.hardware.profile import Profile
from tutti.models.load import load_model


class Asked(NamedTuple):
    """What to measure, and what is known already."""

    cases: list[ProfileCase]
    known: Profile | None


def wanted_cases(
    model: str | None, tokens: Sequence[int], sequence_length: int, *, serve: bool
) -> list[ProfileCase]:
    """Return a model's cases, if one is named, and then those of the grid."""
    cases: list[ProfileCase] = []
    if model is not None:
        spec = load_model(model)
        if serve:
            cases += served_grid.served_model_cases(spec)
        else:
            cases += grid.model_cases(spec, tokens, sequence_length)
    every = served_grid.served_cases() if serve else grid.default_cases()
    return list(dict.fromkeys([*cases, *every]))


def asked(cases: list[ProfileCase], known: Profile | None, only: Collection[str]) -> Asked:
    """Return the cases of some operators, whose rows in a profile are measured anew."""
    if not only:
        return Asked(cases, known)
    names = {case.operator for case in cases}
    for name in only:
        if name not in names:
            raise InputError(f"--operator is '{name}'; {hint(name, sorted(names))}")
    kept = None if known is None else known.without_operators(only)
    return Asked([case for case in cases if case.operator in only], kept)
