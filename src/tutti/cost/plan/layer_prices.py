"""The prices of a pool by a per-layer profile: seconds and bytes of units as they were measured.

A profile gives forward and backward together; each of forward, input gradient and weight gradient
takes a third, for each of them runs a block's products once. Recomputation is scaled by the cost
model's ratio to a forward pass. Links, collectives and host copies stay the cost model's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tutti.cost.calibration.intervals import Known, measured_half_width
from tutti.cost.calibration.shipped import Calibration
from tutti.cost.measured.chip import MeasuredChip
from tutti.cost.measured.layer_profile_prices import ProfiledPool
from tutti.cost.memory.instruction_memory import MemoryModel
from tutti.cost.memory.rank_state import RankState
from tutti.cost.operators.exposed_communication import AS_PRICED
from tutti.cost.plan.pool_prices import PoolPrices, UnitTimes
from tutti.hardware.cluster import Cluster
from tutti.hardware.pool import Pool
from tutti.models.memory import Recompute
from tutti.models.operators import Workload
from tutti.models.spec import ModelSpec
from tutti.plan.plan import Plan

PASSES = 3  # forward, input gradient, weight gradient


class LayerPrices(PoolPrices):
    """The prices of a pool whose units were measured, each for itself."""

    units_alike = False

    def __init__(
        self,
        plan: Plan,
        model: ModelSpec,
        cluster: Cluster,
        pool: Pool,
        calibration: Calibration | None,
        measured: MeasuredChip | None,
        layers: ProfiledPool,
        known: Known,
    ) -> None:
        super().__init__(plan, model, cluster, pool, calibration, measured, known=known)
        self._layers = layers
        self.basis = f"{self._layers.basis}; its links {self._links}"

    def extrapolations(self, work: Workload, **degrees: float) -> tuple[str, ...]:
        """Return what of a workload lies outside the profile."""
        del degrees
        return self._layers.flags(work)

    def half_width(self, work: Workload, **degrees: float) -> float:
        """Return how far predictions of a workload may be off."""
        return measured_half_width(self.extrapolations(work, **degrees))

    def unit(self, work: Workload, unit: int, recompute: Recompute, **inside: Any) -> UnitTimes:
        """Return the seconds of a unit as measured."""
        longer = super().unit(work, unit, recompute, **inside)
        times = super().unit(work, unit, recompute, **{**inside, "longer": AS_PRICED})
        third = float(self._layers.figures(work).seconds[unit]) / PASSES
        again = times.recompute / times.forward if times.forward else 0.0
        measured = UnitTimes(third, again * third, third, third)
        added = (b - a for a, b in zip(times, longer, strict=True))
        return UnitTimes(*(a + b for a, b in zip(measured, added, strict=True)))

    def memory(self, rank_state: RankState) -> ProfiledMemory:
        """Return the bytes of a class of ranks as measured."""
        return ProfiledMemory(rank_state, self._layers)

    def updates(self, memory: MemoryModel) -> Callable[[int, int], float]:
        """Return how to ask for a range of units' part of the optimizer's step on a rank."""
        assert isinstance(memory, ProfiledMemory)
        work, layers = memory.rank_state.workload, self._layers
        return lambda start, stop: layers.optimizer_s(work, memory.updated_units(start, stop))


class ProfiledMemory(MemoryModel):
    """The bytes of one class of ranks as they were measured.

    What stays is split into parameters (the profile's), gradients (as many) and optimizer states
    (the rest), which shard as the plan says; what every sequence adds is kept by the unit.
    Transient gradients are part of the measured bytes.
    """

    def __init__(self, rank_state: RankState, pool: ProfiledPool) -> None:
        super().__init__(rank_state)
        self._figures = pool.figures(rank_state.workload)

    def _kept(self, unit: int) -> float:
        return self._moving(unit) * self._kept_share(unit)

    def _again(self, unit: int) -> float:
        return self._moving(unit) * (1.0 - self._kept_share(unit))

    def _moving(self, unit: int) -> float:
        return float(self._figures.memory_bytes[unit] - self._figures.fixed_bytes[unit])

    def _kept_share(self, unit: int) -> float:
        """What recomputation leaves of a unit's activations, by the cost model."""
        if self.rank_state.recompute_kind(unit) == "none":
            return 1.0
        whole = self.rank_state.activations(unit, "none")
        return min(1.0, self.rank_state.activations(unit) / whole) if whole else 1.0

    def _forward_buffers(self, unit: int) -> float:
        return self._context_buffers(unit)

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
        shares = self.rank_state.shares(unit)
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
