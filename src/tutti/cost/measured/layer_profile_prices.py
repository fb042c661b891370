"""Pricing a plan by a per-layer profile: seconds and bytes of units as they were measured.

A profile gives forward and backward together; each of forward, input gradient and weight gradient
takes a third, for each of them runs a block's products once. What a profile has not seen (another
sequence length, context parallelism, a micro-batch outside the measured ones) is refused, or
extrapolated and flagged. Recomputation is scaled by the cost model's ratio to a forward pass.
Links, collectives and host copies stay the cost model's.
"""

from __future__ import annotations

from dataclasses import dataclass

from tutti.cost.measured.layer_profiles import LayerFigures, LayerProfiles
from tutti.cost.memory.instruction_memory import MemoryModel
from tutti.cost.memory.rank_state import Holdings
from tutti.errors import InputError
from tutti.hardware.chip import Chip
from tutti.hardware.cluster import Cluster
from tutti.models.memory import local_parameters
from tutti.models.operators import Workload
from tutti.models.spec import ModelSpec

PASSES = 3  # forward, input gradient, weight gradient
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
        length, found = self._measured_length(work), []
        if length != work.sequence_length:
            found.append(f"sequence_length {work.sequence_length}, measured at {length}")
        if work.cp > 1:
            found.append(f"cp {work.cp}, measured without context parallelism")
        return tuple(f"layer profile {self.profiles.folder}: {self.chip}: {f}" for f in found)

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
    found = {
        pool: ProfiledPool(
            profiles=profiles, chip=name, model=model, note=profiles.note(chip),
            extrapolate=extrapolate,
        )
        for pool, chip in chips.items()
        if (name := profiles.name_of(chip)) is not None
    }  # fmt: skip
    if not found:
        raise InputError(
            f"layer profile {profiles.folder}: covers {', '.join(profiles.chips)}, but the plan "
            f"runs on {', '.join(sorted(_names(chips)))}; leave --profile out"
        )
    return found


def _names(chips: dict[str, Chip]) -> set[str]:
    return {chip.name for chip in chips.values()}


class ProfiledMemory(MemoryModel):
    """The bytes of one class of ranks as they were measured.

    What stays is split into parameters (the profile's), gradients (as many) and optimizer states
    (the rest), which shard as the plan says; what every sequence adds is kept by the unit.
    Transient gradients are part of the measured bytes.
    """

    def __init__(self, holdings: Holdings, pool: ProfiledPool) -> None:
        super().__init__(holdings)
        self._figures = pool.figures(holdings.workload)

    def _kept(self, unit: int) -> float:
        return self._moving(unit) * self._kept_share(unit)

    def _again(self, unit: int) -> float:
        return self._moving(unit) * (1.0 - self._kept_share(unit))

    def _moving(self, unit: int) -> float:
        return float(self._figures.memory_bytes[unit] - self._figures.fixed_bytes[unit])

    def _kept_share(self, unit: int) -> float:
        """What recomputation leaves of a unit's activations, by the cost model."""
        if self.holdings.recompute_kind(unit) == "none":
            return 1.0
        whole = self.holdings.activations(unit, "none")
        return min(1.0, self.holdings.activations(unit) / whole) if whole else 1.0

    def _input_gradients(self, unit: int) -> float:
        del unit
        return 0.0

    def _weight_gradients(self, unit: int) -> float:
        del unit
        return 0.0

    def made_once(self, unit: int) -> bool:
        """Tell nothing apart: gradients are part of what was measured to stay."""
        del unit
        return False

    def _copies(self, unit: int) -> tuple[float, float, float]:
        """Return the unsharded bytes of parameters, gradients and optimizer states."""
        fixed = float(self._figures.fixed_bytes[unit])
        one = min(float(self._figures.parameter_bytes[unit]), fixed)
        gradients = min(one, fixed - one)
        return one, gradients, fixed - one - gradients

    def _share(self, unit: int, level: int) -> float:
        """The share of its slices whose state of `level` a rank holds."""
        shares = self.holdings.shares(unit)
        whole = sum(share.trained for share in shares)
        held = sum(share.kept if share.level >= level else share.trained for share in shares)
        return held / whole if whole else 1.0

    def _parameter_shard(self, unit: int) -> float:
        return self._copies(unit)[0] * self._share(unit, 3)

    def _gradient_shard(self, unit: int) -> float:
        return self._copies(unit)[1] * self._share(unit, 2)

    def _optimizer_shard(self, unit: int) -> float:
        return self._copies(unit)[2] * self._share(unit, 1)

    def updated_units(self, start: int, stop: int) -> float:
        """Return how many units a rank's optimizer updates of a range; a shard is part of one."""
        return sum(self._share(unit, 1) for unit in range(start, stop))


def memory_model(holdings: Holdings, pool: ProfiledPool | None) -> MemoryModel:
    """Return the measured bytes where a profile covers the chips, the cost model's otherwise."""
    return MemoryModel(holdings) if pool is None else ProfiledMemory(holdings, pool)
