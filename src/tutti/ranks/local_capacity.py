"""Whether this machine can hold all ranks of a plan; asked before any is started. Needs no torch.

Emulated chips and CPUs are always here. An accelerator must be: a plan for a cluster is refused on
a laptop at once, rather than by as many processes as the cluster has chips.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from tutti.errors import InputError
from tutti.hardware.chip import Chip
from tutti.hardware.cluster import Cluster
from tutti.hardware.discover import Run, find_devices, match_chip, run_tool
from tutti.hardware.library import shipped
from tutti.hardware.present import VENDORS, chips_by_vendor
from tutti.hardware.smi import Device
from tutti.hardware.topology import Position
from tutti.launch.identity import used_chips
from tutti.plan.plan import Plan
from tutti.units import bytes_text, many

DEVICE = "TUTTI_DEVICE"  # overrides where a rank runs: cpu, or a device by its kind and number
SHARING = "CUDA_MPS_PIPE_DIRECTORY"  # set where several processes share one device on purpose
LEAST_MEMORY = 0.9  # of what the plan expects; drivers keep some


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


def require_node_here(
    node: str, cluster: Cluster, environ: Mapping[str, str], run: Run = run_tool
) -> None:
    """Raise unless this machine's accelerators are those of a node, as far as its tools tell."""
    pool = cluster.pool(node.split("/")[0])
    chip, wanted = pool.chip, pool.node.num_chips
    if chip.emulated or environ.get(DEVICE) or environ.get(SHARING):
        return
    here = Counter(
        _kind(device, VENDORS[tool], chip)
        for tool, devices, _ in find_devices(run)
        for device in devices
    )
    counted = chips_by_vendor(run)  # by device files, where there are no tools
    if not here and counted.get(chip.vendor.casefold(), wanted) < wanted:
        here[chip.name] = counted[chip.vendor.casefold()]
    if here and here[chip.name] < wanted:
        told = ", ".join(f"{count} × {name}" for name, count in sorted(here.items()) if count)
        raise InputError(
            f"node {node}: the cluster file says {wanted} × {chip.name} of "
            f"{bytes_text(chip.memory_bytes)}, this host has {told or 'none'}; correct the cluster "
            "file and plan again, or join as the node that this host is (--node)"
        )


def _kind(device: Device, vendor: str, expected: Chip) -> str:
    """Return the name of a device's chip; the expected one's where it may be that."""
    catalog = shipped()
    kind = match_chip(device, catalog)
    name = kind.name if kind is not None else device.name
    # a chip that the cluster file describes itself may be any of its vendor
    if expected.name not in catalog.chips and vendor == expected.vendor.casefold():
        name = expected.name
    if name == expected.name and 0 < device.memory_bytes < LEAST_MEMORY * expected.memory_bytes:
        return f"{name} of {bytes_text(device.memory_bytes)}"
    return name
