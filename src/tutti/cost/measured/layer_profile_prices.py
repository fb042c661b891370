"""A per-layer profile as it stands for the chips of a plan.

What a profile has not seen (another sequence length, context parallelism, a micro-batch outside the
measured ones) is refused, or extrapolated and flagged. `cost.plan.layer_prices` prices by it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tutti.cost.measured.layer_profiles import LayerFigures, LayerProfiles
from tutti.errors import InputError
from tutti.hardware.chip import Chip
from tutti.hardware.cluster import Cluster
from tutti.models.memory import local_parameters
from tutti.models.operators import Workload
from tutti.models.spec import ModelSpec

_ELEMENTS = (2.0, 4.0)  # bytes of a parameter, as profiles are trained in 16 or 32 bit
_TOLERANCE = 0.05  # of that, for implementations differ in biases and norms


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledPool:
    """A layer profile as it stands for one chip of a plan."""

    profiles: LayerProfiles
    chip: str  # as the profile calls it
    model: ModelSpec
    note: str
    extrapolate: bool

    @property
    def basis(self) -> str:
        """What a prediction that rests on it says of itself."""
        return f"layer profile {self.profiles.folder} ({self.note})"

    def figures(self, work: Workload) -> LayerFigures:
        """Return the measured figures for a micro-batch; tokens count as sequences measured."""
        flags = self._unlike(work)
        if flags and not self.extrapolate:
            raise InputError(f"{flags[0]}; measure it, plan as it was measured, "
                             "or say --extrapolate")  # fmt: skip
        batch = float(work.sequences)
        if flags:
            batch = work.tokens / self._measured_length(work)
        return self.profiles.at(self.chip, work.tp, batch, extrapolate=self.extrapolate)

    def flags(self, work: Workload) -> tuple[str, ...]:
        """Return what of a workload lies outside the profile."""
        return (*self._unlike(work), *self.figures(work).flags)

    def _unlike(self, work: Workload) -> tuple[str, ...]:
        length, unlike = self._measured_length(work), []
        if length != work.sequence_length:
            unlike.append(f"sequence_length {work.sequence_length}, measured at {length}")
        if work.cp > 1:
            unlike.append(f"cp {work.cp}, measured without context parallelism")
        return tuple(f"layer profile {self.profiles.folder}: {self.chip}: {f}" for f in unlike)

    def _measured_length(self, work: Workload) -> int:
        """Return the sequence length of the measurements: what a block hands on, per sequence."""
        batch = self.profiles.batches(self.chip, work.tp)[0]
        figures = self.profiles.figures[self.chip, work.tp, batch]
        count = local_parameters(self.model, 1, tp=work.tp)
        element = float(figures.parameter_bytes[1]) / count
        nearest = min(_ELEMENTS, key=lambda size: abs(size - element))
        if abs(element / nearest - 1.0) > _TOLERANCE:
            raise InputError(
                f"layer profile {self.profiles.folder}: a block has "
                f"{figures.parameter_bytes[1]:.0f} bytes of parameters at tp {work.tp}, but "
                f"{count} parameters in {self.model.name}; is it another model?"
            )
        per_token = batch * self.model.hidden * nearest
        return round(float(figures.boundary_bytes[1]) / per_token) or work.sequence_length

    def optimizer_s(self, work: Workload, units: float) -> float:
        """Return the seconds of the optimizer's step over so many of the model's units."""
        return self.figures(work).optimizer_s * units / self.profiles.num_units


def profiled_pools(
    profiles: LayerProfiles | None,
    model: ModelSpec,
    cluster: Cluster,
    used: set[str],
    *,
    extrapolate: bool = False,
) -> dict[str, ProfiledPool]:
    """Return the profile of every used pool whose chip was measured, by the pool's name."""
    if profiles is None:
        return {}
    num_units = model.head_unit + 1
    if profiles.num_units != num_units:
        raise InputError(
            f"layer profile {profiles.folder}: has {profiles.num_units} layers, but {model.name} "
            f"has {num_units} units ({num_units - 2} blocks, embedding and head)"
        )
    chips = {pool.name: pool.chip for pool in cluster.pools if pool.name in used}
    pools = {
        pool: ProfiledPool(
            profiles=profiles, chip=name, model=model, note=profiles.note(chip),
            extrapolate=extrapolate,
        )
        for pool, chip in chips.items()
        if (name := profiles.name_of(chip)) is not None
    }  # fmt: skip
    if not pools:
        raise InputError(
            f"layer profile {profiles.folder}: covers {', '.join(profiles.chips)}, but the plan "
            f"runs on {', '.join(sorted(_names(chips)))}; leave --profile out"
        )
    return pools


def _names(chips: dict[str, Chip]) -> set[str]:
    return {chip.name for chip in chips.values()}
