"""What the prices of a plan rest on, besides the chip catalog: the caller's choice."""

from __future__ import annotations

from dataclasses import dataclass, field

from tutti.cost.calibration.intervals import Known
from tutti.cost.calibration.shipped import (
    Calibration,
    best_match,
    of_stack,
    shipped_calibrations,
)
from tutti.cost.constants import Constants
from tutti.cost.kernels import Kernels
from tutti.cost.measured.layer_profiles import LayerProfiles
from tutti.cost.memory.instruction_memory import Overheads
from tutti.cost.memory.measured_passes import MeasuredRanks
from tutti.hardware.pool import Pool
from tutti.hardware.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Calibrations and profiles to price by, and what the software does.

    A chip's profile prices the operators of units on it; links and collectives stay with the
    calibration. None is used unless it is asked for, not even one that ships: it is of tutti's own
    engine, while the calibrations are of the stacks that published their runs. The caller's own
    calibrations come before those that ship. `extrapolate` lets layer profiles be used beyond what
    they measured; what was extrapolated is said either way. `constants` stand in place of every
    calibration's, for one whose values are being judged. `measured_ranks` say what passes take of
    memory, where somebody ran them.
    """

    calibrations: tuple[Calibration, ...] = ()
    layer_profiles: LayerProfiles | None = None
    profiles: tuple[Profile, ...] = ()
    extrapolate: bool = False
    constants: Constants | None = None
    kernels: Kernels = field(default_factory=Kernels)
    overheads: Overheads = field(default_factory=Overheads)
    measured_ranks: MeasuredRanks = field(default_factory=dict)

    def calibration(self, pool: Pool, **values: float) -> Calibration | None:
        """Return the calibration that suits a pool best; None: nobody measured its chip.

        The caller's own come first. A pool that names its software stack gets the one that is
        nearest to it; otherwise the one that promises the smallest error at `values` (tp=8, …).
        """
        for known in (self.calibrations, shipped_calibrations()):
            suitable = [c for c in known if pool.chip.name in c.chips]
            if pool.stack:
                best = best_match(suitable, pool.chip.name, pool.stack)
            else:
                best = min(suitable, key=lambda c: (_promise(c, values), c.name), default=None)
            if best is not None:
                return best
        return None

    def known(self, pool: Pool, calibration: Calibration | None) -> Known:
        """Return what the runs of a pool's calibration have in common with it.

        The caller's own are of his cluster; those that ship are of others, whoever names them.
        """
        if calibration is None:
            return Known.NOTHING
        if calibration not in shipped_calibrations():
            return Known.CLUSTER
        return Known.STACK if of_stack(calibration, pool.stack) else Known.CHIP


def _promise(calibration: Calibration, values: dict[str, float]) -> float:
    """The error to expect, in percent: of the fit, of few rows, of every range that is left."""
    few = 20.0 / max(1, calibration.fit.rows)
    return calibration.fit.mape_pct + few + 3.0 * len(calibration.extrapolations(**values))
