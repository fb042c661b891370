"""What chips of one architecture have in common, for those of which no run was ever seen."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Annotated

from tutti import document, files
from tutti.cost.constants import Constants, registry
from tutti.document import Above, Place
from tutti.errors import hint
from tutti.hardware.chip import Chip
from tutti.hardware.library import shipped

LAUNCH_S = 5e-6  # of one kernel, in the priors of host times
_FILE = "families.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyPrior:
    """A log-normal belief of a constant, and where it comes from."""

    median: Annotated[float, Above(0)]
    sigma: Annotated[float, Above(0)]
    source: str


@functools.lru_cache(maxsize=1)
def families() -> Mapping[str, Mapping[str, FamilyPrior]]:
    """Return the beliefs of every architecture that has some of its own."""
    text = resources.files("tutti.cost").joinpath(_FILE).read_text(encoding="utf-8")
    kind = dict[str, dict[str, FamilyPrior]]
    beliefs = document.build(kind, files.parse_yaml(text, _FILE), Place(_FILE))
    for architecture, priors in beliefs.items():
        for name in priors:
            if name not in registry():
                raise ValueError(
                    f"{_FILE}: {architecture}: no constant '{name}'; {hint(name, registry())}"
                )
    return beliefs


@functools.lru_cache(maxsize=256)
def family_priors(chip: str) -> Mapping[str, FamilyPrior]:
    """Return what is believed of a chip of the catalog because of its architecture."""
    known = shipped().chips.get(chip)
    return {} if known is None else families().get(known.architecture, {})


def family_median(name: str, chip: str) -> float:
    """Return what a constant is believed to be on a chip: its architecture's, or everybody's."""
    own = family_priors(chip).get(name)
    return registry()[name].prior if own is None else own.median


def nominal_constants(chip: Chip) -> Constants:
    """Return the priors of a chip that nobody measured: its architecture's, where there are some.

    Those of host times count launches of `LAUNCH_S`: longer ones are a higher launch floor.
    """
    plain, slower = Constants(), chip.launch_overhead_s / LAUNCH_S
    family = families().get(chip.architecture, {})
    return replace(
        plain,
        **{name: prior.median for name, prior in family.items()},
        host_layer_s=plain.host_layer_s * slower,
        host_tp_s=plain.host_tp_s * slower,
        host_head_s=plain.host_head_s * slower,
        host_step_s=plain.host_step_s * slower,
        moe_host_s=plain.moe_host_s * slower,
    )


def nominal_label(chip: Chip) -> str:
    """Return what the prices of a chip rest on of which no run was seen."""
    has_own = families().get(chip.architecture)
    return f"nominal, not measured{f'; priors of {chip.architecture}' if has_own else ''}"
