"""Reads the tables that vendors' tools print: nvidia-smi, npu-smi, xpu-smi. Text in, facts out.

It runs nothing and knows no catalog; `discover` does both. Lines that do not fit are passed over,
for these tables change with every driver.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace

_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator as its vendor's tool shows it."""

    index: int
    name: str
    memory_bytes: float
    numa: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryErrors:
    """Errors of a chip's memory since its driver was loaded."""

    uncorrected: int
    corrected: int | None = None  # None: the tool does not show them


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a tool shows of a chip at a moment; None: it does not."""

    index: int  # among all chips of the tool
    card: int
    chip: int = 0  # of the card
    well: bool | None = None
    busy_ratio: float | None = None
    memory_used_bytes: float | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    errors: MemoryErrors | None = None

    def with_errors(self, errors: MemoryErrors | None) -> Reading:
        """Return it with the errors of its memory, which another call shows."""
        return self if errors is None else replace(self, errors=errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """What `topo -m` says: which devices share native links, and their NUMA nodes."""

    islands: tuple[tuple[int, ...], ...] = ()
    numa: tuple[int | None, ...] = ()


def parse_nvidia(text: str) -> tuple[Device, ...]:
    """Read `nvidia-smi --query-gpu=index,name,memory.total --format=csv,noheader,nounits`."""
    devices = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3 and cells[0].isdecimal():
            memory = re.match(r"\d+(\.\d+)?", cells[2])
            size = float(memory.group()) * _MIB if memory else 0.0
            devices.append(Device(index=int(cells[0]), name=cells[1], memory_bytes=size))
    return tuple(devices)


_NPU_HEAD = re.compile(r"^\|\s*\d+\s+(?P<name>[A-Za-z0-9_-]*9\d\d[A-Za-z0-9_-]*)\s*\|")
_NPU_CHIP = re.compile(
    r"^\|\s*\d+(\s+\d+)?\s*\|\s*[0-9A-Fa-f]{4}:[0-9A-Fa-f:.]+\s*\|(?P<rest>.*)\|"
)
_USAGE = re.compile(r"(\d+)\s*/\s*(\d+)")


def parse_npu(text: str) -> tuple[Device, ...]:
    """Read `npu-smi info`: two rows per chip, the name above, the HBM below."""
    devices: list[Device] = []
    name: str | None = None
    for line in text.splitlines():
        head = _NPU_HEAD.match(line)
        if head:
            name = head["name"]
            continue
        chip = _NPU_CHIP.match(line)
        usage = _USAGE.findall(chip["rest"]) if chip else []
        if chip and name is not None and usage:
            size = float(usage[-1][1]) * _MIB  # the last pair is HBM, also where DDR stands first
            devices.append(Device(index=len(devices), name=name, memory_bytes=size))
            name = None
    return tuple(devices)


_NPU_STATE = re.compile(
    r"^\|\s*(?P<card>\d+)\s+\S+\s*\|\s*(?P<health>[A-Za-z]+)\s*\|\s*(?P<power>[\d.]+|-|NA)\s+"
    r"(?P<heat>[\d.]+|-|NA)\s"
)
_NPU_LOAD = re.compile(
    r"^\|\s*(?P<chip>\d+)(?:\s+\d+)?\s*\|\s*[0-9A-Fa-f]{4}:[0-9A-Fa-f:.]+\s*\|\s*"
    r"(?P<busy>[\d.]+|-|NA)\s+(?P<rest>.*)\|"
)


def npu_readings(text: str) -> tuple[Reading, ...]:
    """Read what `npu-smi info` says of each chip now."""
    readings: list[Reading] = []
    state: re.Match[str] | None = None
    for line in text.splitlines():
        if match := _NPU_STATE.match(line):
            state = match
            continue
        load = _NPU_LOAD.match(line)
        if load is None or state is None:
            continue
        usage = _USAGE.findall(load["rest"])
        busy = _number(load["busy"])
        readings.append(
            Reading(
                index=len(readings),
                card=int(state["card"]),
                chip=int(load["chip"]),
                well=state["health"].casefold() == "ok",
                busy_ratio=None if busy is None else busy / 100,
                memory_used_bytes=float(usage[-1][0]) * _MIB if usage else None,
                power_watts=_number(state["power"]),
                temperature_celsius=_number(state["heat"]),
            )
        )
        state = None
    return tuple(readings)


_NPU_FIELD = re.compile(r"^\s*(?P<name>[A-Za-z][^:]*?)\s*:\s*(?P<value>\d+)\s*$")


def npu_memory_errors(text: str) -> dict[int, MemoryErrors]:
    """Read `npu-smi info -t ecc -i CARD`: per chip of a card; a chip's number ends its block."""
    blocks: dict[int, MemoryErrors] = {}
    counts = {"Double": 0, "Single": 0}
    any_read = False
    for line in text.splitlines():
        field = _NPU_FIELD.match(line)
        if field is None:
            continue
        counter = re.fullmatch(r"(?:HBM|DDR) (Single|Double) Bit Error Count", field["name"])
        if counter:
            counts[counter[1]] += int(field["value"])
            any_read = True
        elif field["name"] == "Chip ID" and any_read:
            chip = int(field["value"])
            blocks[chip] = MemoryErrors(uncorrected=counts["Double"], corrected=counts["Single"])
            counts, any_read = {"Double": 0, "Single": 0}, False
    if any_read:  # of one chip, whose number is not shown
        blocks[0] = MemoryErrors(uncorrected=counts["Double"], corrected=counts["Single"])
    return blocks


def _number(text: str) -> float | None:
    """Return a number of a table; None where it shows none."""
    try:
        return float(text)
    except ValueError:
        return None


_XPU_HEAD = re.compile(r"^\|\s*(?P<index>\d+)\s+(?P<name>\S.*?)\s{2,}\S+\s*\|\s*[0-9A-Fa-f]{8}:")
_XPU_MEMORY = re.compile(r"(\d+)MiB\s*/\s*(\d+)MiB")


def parse_xpu(text: str) -> tuple[Device, ...]:
    """Read `xpu-smi` of Kunlunxin: name and bus in the first row, memory in the second."""
    devices: list[Device] = []
    head: re.Match[str] | None = None
    for line in text.splitlines():
        match = _XPU_HEAD.match(line)
        if match:
            head = match
            continue
        memory = _XPU_MEMORY.search(line)
        if head is not None and memory:
            size = float(memory[2]) * _MIB
            devices.append(Device(index=int(head["index"]), name=head["name"], memory_bytes=size))
            head = None  # the L3 row that follows is no device memory
    return tuple(devices)


_XPU_ERRORS = re.compile(r"\|\s*(?P<count>\d+|N/A)\s*\|\s*$")
_XPU_HEAT = re.compile(r"\s(?P<heat>\d+)C\s")
_XPU_POWER = re.compile(r"(?P<power>[\d.]+)W\s*/")
_XPU_BUSY = re.compile(r"(?P<busy>\d+)%")


def xpu_readings(text: str) -> tuple[Reading, ...]:
    """Read what `xpu-smi` of Kunlunxin says of each chip now."""
    readings: list[Reading] = []
    head: tuple[int, str] | None = None
    for line in text.splitlines():
        if match := _XPU_HEAD.match(line):
            errors = _XPU_ERRORS.search(line)
            head = int(match["index"]), errors["count"] if errors else "N/A"
            continue
        memory = _XPU_MEMORY.search(line)
        if head is None or memory is None:
            continue
        heat, power, busy = (e.search(line) for e in (_XPU_HEAT, _XPU_POWER, _XPU_BUSY))
        readings.append(
            Reading(
                index=head[0],
                card=head[0],
                busy_ratio=float(busy["busy"]) / 100 if busy else None,
                memory_used_bytes=float(memory[1]) * _MIB,
                power_watts=float(power["power"]) if power else None,
                temperature_celsius=float(heat["heat"]) if heat else None,
                errors=MemoryErrors(uncorrected=int(head[1])) if head[1].isdecimal() else None,
            )
        )
        head = None
    return tuple(readings)


def parse_topology(text: str) -> Topology:
    """Read `nvidia-smi topo -m` or `xpu-smi topo -m`: NV# and XL mark native links."""
    rows: list[list[str]] = []
    header: list[str] = []
    for raw in text.splitlines():
        line = re.sub(r"\x1b\[[0-9;]*m", "", raw)
        cells = [c.strip() for c in line.split("\t")] if "\t" in line else line.split()
        first = next((cell for cell in cells if cell), "")
        if re.fullmatch(r"(GPU|XPU)\d+", first):
            if not header and not any(cell == "X" for cell in cells):
                header = [cell for cell in cells if cell]
            else:
                rows.append([cell for cell in cells if cell])
    size = len(rows)
    native = [[bool(re.match(r"(NV\d+|XL)", cell)) for cell in row[1 : size + 1]] for row in rows]
    return Topology(islands=_groups(native), numa=tuple(_numa(row) for row in rows))


def _numa(row: list[str]) -> int | None:
    """Return the NUMA column: after the CPU affinity ("0-31,64-95"), a plain number."""
    for before, cell in itertools.pairwise(row):
        if re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", before) and cell.isdecimal():
            return int(cell)
    return None


def _groups(native: list[list[bool]]) -> tuple[tuple[int, ...], ...]:
    """Return the connected groups of two or more devices."""
    left, groups = set(range(len(native))), []
    while left:
        group, grown = {min(left)}, True
        while grown:
            reached = {b for a in group for b, yes in enumerate(native[a]) if yes and b in left}
            grown = not reached <= group
            group |= reached
        left -= group
        if len(group) > 1:
            groups.append(tuple(sorted(group)))
    return tuple(groups)
