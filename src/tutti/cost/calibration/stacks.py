"""Stacks: which constants the runs of one chip and software stack may move, from `stacks.yaml`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Annotated

import numpy as np

from tutti import document, files
from tutti.cost.constants import FloatArray, registry
from tutti.cost.families import FamilyPrior, family_priors
from tutti.document import Above, Place
from tutti.errors import hint

_FILE = "stacks.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """A log-normal belief in place of the registry's."""

    median: Annotated[float, Above(0)]
    sigma: Annotated[float, Above(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The constants that one (chip, stack) frees; the others keep their priors."""

    stack: str
    chips: tuple[str, ...]
    groups: tuple[str, ...]
    compute: tuple[str, ...]
    cluster: tuple[str, ...]
    noise: Annotated[float, Above(0)] = 0.025
    priors: Mapping[str, Prior] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = registry()
        for name in (*self.compute, *self.cluster, *self.priors):
            if name not in known:
                raise ValueError(f"there is no constant '{name}'; {hint(name, known)}")

    @property
    def num_free(self) -> int:
        """Free constants: the shared ones, and the cluster's once per group."""
        return len(self.compute) + len(self.cluster) * len(self.groups)

    def belief(self, name: str) -> tuple[float, float]:
        """Return median and log-sigma of a constant before any run is seen."""
        own = self.priors.get(name) or self._family.get(name)
        if own is not None:
            return own.median, own.sigma
        spec = registry()[name]
        return spec.prior, spec.sigma

    @property
    def _family(self) -> Mapping[str, FamilyPrior]:
        return family_priors(self.chips[0]) if self.chips else {}

    def medians(self) -> dict[str, float]:
        """Return the medians that are other than the registry's: the family's, then its own."""
        medians = {name: prior.median for name, prior in self._family.items()}
        return medians | {name: prior.median for name, prior in self.priors.items()}

    def value(self, name: str, z: FloatArray) -> FloatArray:
        """Return the constant that lies `z` log-sigmas from its median, within its bounds."""
        median, sigma = self.belief(name)
        spec = registry()[name]
        return np.clip(median * np.exp(sigma * z), spec.low, spec.high)

    def with_groups(self, groups: tuple[str, ...]) -> Stack:
        """Return the stack for other groups: the same constants, a cluster each."""
        return replace(self, groups=groups)


@functools.lru_cache(maxsize=1)
def stacks() -> Mapping[str, Stack]:
    """Return the stacks that runs are sorted into, by name."""
    text = resources.files(__package__).joinpath(_FILE).read_text(encoding="utf-8")
    return document.build(dict[str, Stack], files.parse_yaml(text, _FILE), Place(_FILE))
