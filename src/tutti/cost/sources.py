"""What the prices of a plan rest on, besides the chip catalog: the caller's choice."""

from __future__ import annotations

from dataclasses import dataclass, field

from tutti.cost.calibration.shipped import Calibration, best_match, load_calibration
from tutti.cost.holdings import Kernels
from tutti.cost.layer_profiles import LayerProfiles
from tutti.cost.memory import Overheads
from tutti.hardware.cluster import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Calibrations and layer profiles to price by, and what the software does.

    The caller's own calibrations come before those that ship. `extrapolate` lets layer profiles be
    used beyond what they measured; what was extrapolated is said either way.
    """

    calibrations: tuple[Calibration, ...] = ()
    layer_profiles: LayerProfiles | None = None
    extrapolate: bool = False
    kernels: Kernels = field(default_factory=Kernels)
    overheads: Overheads = field(default_factory=Overheads)

    def calibration(self, pool: Pool) -> Calibration | None:
        """Return the calibration that suits a pool best; None: nobody measured its chip."""
        stack = pool.stack or None
        own = best_match(self.calibrations, pool.chip.name, stack)
        return own if own is not None else load_calibration(pool.chip.name, stack)
