"""Finds out what the machine at hand is: a cluster of one node per kind of chip, without torch.

Asks the vendors' tools where they are installed, and /proc, /sys and psutil for the host. What it
cannot find out it takes from the catalog, and says so in `notes`.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from tutti.errors import nearest
from tutti.hardware import smi
from tutti.hardware.chip import Chip, Dtype
from tutti.hardware.cluster import Cluster
from tutti.hardware.fabric import CrossKind, CrossLink, Fabric
from tutti.hardware.library import Library, shipped
from tutti.hardware.node import Bridge, Host, Island, Nic, NodeType
from tutti.hardware.pool import Pool
from tutti.hardware.slots import Slots
from tutti.hardware.topology import HOST_FORWARD_LATENCY_S

Run = Callable[[list[str]], str]


@dataclass(frozen=True, slots=True)
class Discovery:
    """What was found, and what had to be assumed."""

    cluster: Cluster
    notes: tuple[str, ...]


def run_tool(command: list[str]) -> str:
    """Return what a tool prints; nothing where it is missing, fails or hangs."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def discover(run: Run = run_tool, root: Path = Path("/")) -> Discovery:
    """Return this machine as a cluster; `run` and `root` are replaced in tests."""
    notes: list[str] = []
    host = find_host(root)
    nics = find_nics(root)
    pools: list[Pool] = []
    for name, devices, topology in find_devices(run):
        pools += _accelerator_pools(name, devices, topology, host, nics, notes)
    if not pools:
        pools = [_cpu_pool(root, host, nics)]
        notes.append("no accelerator found; the CPU is described as the chip, its peak estimated")
    links = tuple(
        CrossLink(
            pools=(a.name, b.name),
            kind=CrossKind.HOST_FORWARDED,
            bandwidth=min(a.node.host.device_bandwidth, b.node.host.device_bandwidth),
            latency_s=HOST_FORWARD_LATENCY_S,
            same_host=True,
        )
        for a, b in itertools.combinations(pools, 2)
    )
    notes.append("host memory and PCIe bandwidth are nominal; `tutti profile` measures them")
    cluster = Cluster(
        name="here", summary="this machine", pools=tuple(pools), fabric=Fabric(links=links)
    )
    return Discovery(cluster, tuple(notes))


def find_devices(run: Run) -> list[tuple[str, tuple[smi.Device, ...], smi.Topology]]:
    """Ask every vendor's tool; return (pool name, devices, topology) for those that answer."""
    query = ["nvidia-smi", "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits"]
    devices = []
    nvidia = smi.parse_nvidia(run(query))
    if nvidia:
        devices.append(("gpu", nvidia, smi.parse_topology(run(["nvidia-smi", "topo", "-m"]))))
    ascend = smi.parse_npu(run(["npu-smi", "info"]))
    if ascend:
        devices.append(("npu", ascend, smi.Topology()))
    kunlun = smi.parse_xpu(run(["xpu-smi"])) or smi.parse_xpu(run(["xpu_smi"]))
    if kunlun:
        devices.append(("xpu", kunlun, smi.parse_topology(run(["xpu-smi", "topo", "-m"]))))
    return devices


# --- accelerators ----------------------------------------------------------------------------


def match_chip(device: smi.Device, library: Library) -> Chip | None:
    """Return the catalog's chip for a device: by name, then among variants by memory."""
    cleaned = re.sub(r"^(NVIDIA|Tesla|AMD Instinct|Kunlunxin)\s+", "", device.name).strip()
    cleaned = re.sub(r"^Tesla\s+", "", cleaned)
    if cleaned == "Ascend910":  # what npu-smi calls a die of the 910C
        cleaned = "Ascend-910C-die"
    spellings = {
        spelling.casefold(): chip
        for chip in library.chips.values()
        for spelling in (*chip.aliases, chip.name)
    }
    exact = spellings.get(cleaned.casefold()) or spellings.get(device.name.casefold())
    if exact is not None:
        return exact
    family = re.split(r"[-\s]", cleaned)[0].casefold()
    pcie = "pcie" in cleaned.casefold()
    variants = [
        chip
        for chip in library.chips.values()
        if chip.name.casefold().split("-")[0] == family and ("PCIe" in chip.name) == pcie
    ]
    if not variants:
        return None
    return min(variants, key=lambda chip: abs(chip.memory_bytes - device.memory_bytes))


def _accelerator_pools(
    pool_name: str,
    devices: tuple[smi.Device, ...],
    topology: smi.Topology,
    host: Host,
    nics: tuple[Nic, ...],
    notes: list[str],
) -> list[Pool]:
    library = shipped()
    by_name: dict[str, list[smi.Device]] = {}
    for device in devices:
        by_name.setdefault(device.name, []).append(device)
    pools: list[Pool] = []
    for index, (name, alike) in enumerate(by_name.items()):
        chip = match_chip(alike[0], library)
        if chip is None:
            guess = nearest(name, library.chips)
            near = f" (nearest: {guess})" if guess else ""
            notes.append(
                f"{len(alike)} × '{name}' left out: not in the catalog{near}; "
                "describe it under 'chips' in a cluster file"
            )
            continue
        chip = _with_memory(chip, alike[0].memory_bytes)
        if any(pool.chip.name == chip.name for pool in pools):  # same part, other memory
            chip = replace(chip, name=f"{chip.name}-{index}")
        node = _node(chip, alike, topology, library.node_for(chip), host, nics, notes)
        suffix = "" if len(by_name) == 1 else str(index)
        pools.append(Pool(name=pool_name + suffix, node=node))
    return pools


def _with_memory(chip: Chip, memory_bytes: float) -> Chip:
    """Return the chip with the memory that this machine's tool shows."""
    if memory_bytes in (0, chip.memory_bytes):
        return chip
    sources = {**chip.sources, "memory_bytes": "this machine"}
    return replace(chip, memory_bytes=memory_bytes, sources=sources)


def _node(
    chip: Chip,
    devices: list[smi.Device],
    topology: smi.Topology,
    usual: NodeType,
    host: Host,
    nics: tuple[Nic, ...],
    notes: list[str],
) -> NodeType:
    """Return this machine's node: links as found, their speed from the catalog's usual node."""
    slot_of = {device.index: slot for slot, device in enumerate(devices)}
    groups = [tuple(slot_of[i] for i in group if i in slot_of) for group in topology.islands]
    if not topology.numa and usual.islands:  # the tool told nothing: as in the usual node
        groups = [tuple(island.slots.below(len(devices))) for island in usual.islands]
        notes.append(f"links between {chip.name} chips assumed as in a {usual.name}")
    islands = tuple(
        replace(usual.islands[0], slots=Slots(group))
        if usual.islands
        else Island(kind="native", slots=Slots(group), bandwidth=50e9)
        for group in groups
        if len(group) > 1
    )
    device_bandwidth = usual.host.device_bandwidth
    return NodeType(
        name=f"this-machine-{len(devices)}x{chip.name}",
        chip=chip,
        num_chips=len(devices),
        islands=islands,
        bridge=usual.bridge or Bridge(bandwidth=device_bandwidth),
        nics=nics,
        host=replace(host, device_bandwidth=device_bandwidth),
        source="discovered; link speeds from the catalog",
    )


# --- the host --------------------------------------------------------------------------------


def find_host(root: Path) -> Host:
    """Return the CPU side, from psutil and /sys."""
    numa = [p for p in _children(root / "sys/devices/system/node") if p.name[4:].isdecimal()]
    return Host(
        cores=psutil.cpu_count(logical=False) or psutil.cpu_count() or 1,
        memory_bytes=float(psutil.virtual_memory().total),
        numa_nodes=max(1, len([p for p in numa if p.name.startswith("node")])),
    )


def find_nics(root: Path) -> tuple[Nic, ...]:
    """Return the RDMA ports, or else the fastest physical Ethernet port."""
    rdma = []
    for device in _children(root / "sys/class/infiniband"):
        rate = re.match(r"(\d+(?:\.\d+)?)\s*Gb/sec", _read(device / "ports/1/rate"))
        if rate and "ACTIVE" in _read(device / "ports/1/state"):
            rdma.append(float(rate[1]) * 1e9 / 8)
    if rdma:
        return tuple(Nic(rate=rate, rail=index) for index, rate in enumerate(rdma))
    speeds = []
    for device in _children(root / "sys/class/net"):
        speed = _read(device / "speed").strip()
        if (device / "device").exists() and speed.isdecimal() and int(speed) > 0:
            speeds.append(int(speed) * 1e6 / 8)
    return (Nic(rate=max(speeds)),) if speeds else ()


def _cpu_pool(root: Path, host: Host, nics: tuple[Nic, ...]) -> Pool:
    info = _read(root / "proc/cpuinfo")
    chip = cpu_chip(info, host)
    node = NodeType(
        name="this-machine",
        chip=chip,
        num_chips=1,
        nics=nics,
        host=replace(host, device_bandwidth=50e9, device_latency_s=1e-7),
        source="discovered",
    )
    return Pool(name="cpu", node=node)


# FLOP per cycle and core: two fused multiply-add pipes of the vector width; AMX one tile product.
_VECTORS = (("avx512f", 64), ("avx2", 32), ("avx", 16), ("sve", 32), ("asimd", 16), ("sse2", 8))


def cpu_chip(cpuinfo: str, host: Host) -> Chip:
    """Return all cores of this machine as one chip, its peak estimated from /proc/cpuinfo."""
    flags = set(re.findall(r"\w+", _field(cpuinfo, "flags") + " " + _field(cpuinfo, "Features")))
    ghz = re.search(r"@\s*([\d.]+)\s*GHz", _field(cpuinfo, "model name"))
    mhz = re.match(r"[\d.]+", _field(cpuinfo, "cpu MHz"))
    clock = float(ghz[1]) * 1e9 if ghz else float(mhz[0]) * 1e6 if mhz else 2e9
    width = next((flops for flag, flops in _VECTORS if flag in flags), 8)
    fp32 = host.cores * clock * width
    peak = {Dtype.FP64: fp32 / 2, Dtype.FP32: fp32}
    if "amx_bf16" in flags:
        peak[Dtype.BF16] = host.cores * clock * 2048
    elif "avx512_bf16" in flags or "bf16" in flags:
        peak[Dtype.BF16] = fp32 * 2
    estimate = f"assumed: {host.cores} cores × {clock / 1e9:.2g} GHz × {width} fp32 FLOP per cycle"
    return Chip(
        name="this-CPU",
        vendor=_field(cpuinfo, "vendor_id") or "generic",
        architecture=_field(cpuinfo, "model name"),
        peak=peak,
        memory_bytes=host.memory_bytes,
        memory_bandwidth=max(10e9, min(host.cores, 32) * 6e9),
        compute_units=max(1, host.cores),
        launch_overhead_s=1e-6,
        sources={
            "peak": estimate,
            "memory_bytes": "this machine",
            "memory_bandwidth": "assumed: 6 GB/s per core",
            "compute_units": "this machine",
            "sustained": "assumed: not measured",
            "launch_overhead_s": "assumed: not measured",
        },
    )


def _field(text: str, name: str) -> str:
    match = re.search(rf"^{name}[ \t]*:[ \t]*(.*)$", text, re.MULTILINE)
    return match[1].strip() if match else ""


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
