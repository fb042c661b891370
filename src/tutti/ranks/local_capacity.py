"""Whether this machine can hold all ranks of a plan; asked before any is started. Needs no torch.

Emulated chips and CPUs are always here. An accelerator must be: a plan for a cluster is refused on
a laptop at once, rather than by as many processes as the cluster has chips.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.hardware.present import chips_by_vendor
from tutti.hardware.topology import Position
from tutti.launch.identity import used_chips
from tutti.plan.plan import Plan
from tutti.units import many

DEVICE = "TUTTI_DEVICE"  # overrides where a rank runs: cpu, or a device by its kind and number
SHARING = "CUDA_MPS_PIPE_DIRECTORY"  # set where several processes share one device on purpose


def require_chips_here(
    plan: Plan,
    cluster: Cluster,
    environ: Mapping[str, str],
    present: Callable[[], Mapping[str, int]] = chips_by_vendor,
    chips: Iterable[Position] | None = None,
) -> None:
    """Raise unless this machine has the accelerators that a plan uses, or those of `chips`."""
    if environ.get(DEVICE) or environ.get(SHARING):
        return
    wanted: Counter[str] = Counter()
    names: dict[str, str] = {}
    for position in used_chips(plan) if chips is None else chips:
        chip = cluster.pool(position.pool).chip
        if not chip.emulated:
            vendor = chip.vendor.casefold()
            wanted[vendor] += 1
            names.setdefault(vendor, chip.name)
    here = present() if wanted else {}
    for vendor, count in wanted.items():
        if count > here.get(vendor, count):
            raise InputError(
                f"the plan needs {many(count, 'chip')} like {names[vendor]}, this machine has "
                f"{here[vendor] or 'none'}; start it where they are (tutti launch), plan for this "
                f"machine (--cluster here), or set {DEVICE}=cpu to try it out"
            )
