"""Samplers: what a host, its NICs and its chips count, once per call. What is missing is said once.

A sampler returns values by key: a figure's name and, in braces, its label (`name{nic="eth0"}`).
Paths can be laid elsewhere, so that tests bring a machine of their own.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from tutti.observe.figures import key
from tutti.observe.network.driver_counters import driver_counters, pause_figures

Values = dict[str, float]
Say = Callable[[str], None]
ROOT = Path("/")

# sysfs name below counters/ or hw_counters/ → figure, and what one count is
_RDMA = {
    "counters/port_rcv_data": ("rdma_received_bytes_total", 4.0),
    "counters/port_xmit_data": ("rdma_sent_bytes_total", 4.0),
    "counters/symbol_error": ("rdma_symbol_errors_total", 1.0),
    "counters/link_downed": ("rdma_link_downs_total", 1.0),
    "counters/port_xmit_discards": ("rdma_discards_total", 1.0),
    "counters/port_xmit_wait": ("rdma_wait_ticks_total", 1.0),
    "hw_counters/local_ack_timeout_err": ("rdma_retries_total", 1.0),
    "hw_counters/out_of_sequence": ("rdma_out_of_sequence_total", 1.0),
    "hw_counters/np_ecn_marked_roce_packets": ("rdma_congestion_marks_total", 1.0),
}
_NIC = {
    "rx_bytes": "nic_received_bytes_total",
    "tx_bytes": "nic_sent_bytes_total",
    "rx_errors": "nic_errors_total",
    "tx_errors": "nic_errors_total",
    "rx_dropped": "nic_dropped_total",
    "tx_dropped": "nic_dropped_total",
}
_SECTOR_BYTES = 512


class Sampler(Protocol):
    """Something that can be sampled."""

    def sample(self) -> Values:
        """Return what it counts now."""
        ...


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


class HostSampler:
    """CPU, memory, pressure and disks, as Linux counts them."""

    def __init__(self, say: Say = lambda _: None, root: Path = ROOT) -> None:
        self._root = root
        self._busy: tuple[float, float] | None = None
        if not (root / "proc/pressure/cpu").exists():
            say("this kernel counts no pressure (/proc/pressure)")

    def sample(self) -> Values:
        """Return what the host counts now; the CPUs' share from the second call on."""
        values: Values = {}
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
            values |= self._cpu()
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
            values |= self._memory()
        for resource in ("cpu", "memory", "io"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                line = (self._root / "proc/pressure" / resource).read_text().split()
                values[key("host_pressure_ratio", resource)] = (
                    float(line[1].partition("=")[2]) / 100
                )
        with contextlib.suppress(OSError, ValueError, IndexError):
            values |= self._disks()
        return values

    def _cpu(self) -> Values:
        first = (self._root / "proc/stat").read_text().splitlines()[0].split()[1:9]
        ticks = [float(n) for n in first]
        now = (sum(ticks) - ticks[3] - ticks[4], sum(ticks))
        before, self._busy = self._busy, now
        if before is None or now[1] <= before[1]:
            return {}
        return {key("host_cpu_busy_ratio"): (now[0] - before[0]) / (now[1] - before[1])}

    def _memory(self) -> Values:
        lines = (self._root / "proc/meminfo").read_text().splitlines()
        table = {line.split(":")[0]: float(line.split()[1]) * 1024 for line in lines if ":" in line}
        free, whole = table["MemAvailable"], table["MemTotal"]
        return {
            key("host_memory_available_bytes"): free,
            key("host_memory_used_ratio"): 1 - free / whole,
        }

    def _disks(self) -> Values:
        values: Values = {}
        for line in (self._root / "proc/diskstats").read_text().splitlines():
            words = line.split()
            if words[2].startswith(("loop", "ram")) or words[3] == "0":
                continue
            disk = words[2]
            values[key("host_disk_read_bytes_total", disk)] = float(words[5]) * _SECTOR_BYTES
            values[key("host_disk_written_bytes_total", disk)] = float(words[9]) * _SECTOR_BYTES
            values[key("host_disk_busy_seconds_total", disk)] = float(words[12]) / 1e3
        return values


class NicSampler:
    """Network interfaces, TCP, and ports of InfiniBand and RoCE, from sysfs."""

    def __init__(self, say: Say = lambda _: None, root: Path = ROOT) -> None:
        self._root = root
        ports = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
        self._ports = {f"{p.parents[1].name}:{p.name}": p for p in ports}
        nics = sorted(p.name for p in (root / "sys/class/net").glob("*")) if root == ROOT else []
        # drivers are asked by name, whatever folder stands for the machine
        self._drivers = [nic for nic in nics if pause_figures(driver_counters(nic))]
        if not ports:
            say("no port of InfiniBand or RoCE on this host")

    def sample(self) -> Values:
        """Return what the NICs count now."""
        values: Values = {}
        for folder in sorted((self._root / "sys/class/net").glob("*/statistics")):
            if folder.parent.name == "lo":
                continue
            for file, name in _NIC.items():
                if (value := _number(folder / file)) is not None:
                    at = key(name, folder.parent.name)
                    values[at] = values.get(at, 0.0) + value
        for port, folder in self._ports.items():
            for file, (name, unit) in _RDMA.items():
                if (value := _number(folder / file)) is not None:
                    values[key(name, port)] = value * unit
        for nic in self._drivers:
            for name, value in pause_figures(driver_counters(nic)).items():
                values[key(name, nic)] = value
        with contextlib.suppress(OSError, ValueError, IndexError):
            values |= self._tcp()
        return values

    def _tcp(self) -> Values:
        lines = (self._root / "proc/net/snmp").read_text().splitlines()
        names, values = (line.split() for line in lines if line.startswith("Tcp:"))
        sent_again = float(values[names.index("RetransSegs")])
        return {key("tcp_retransmitted_segments_total"): sent_again}


class ChipSampler:
    """NVIDIA's chips through their management library, where it is installed."""

    def __init__(self, say: Say = lambda _: None, library: Any = None) -> None:
        self._chips: list[Any] = []
        try:
            self._nvml = library or importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            self._chips = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        except ImportError:
            say("nvidia-ml-py is not installed: no figures of chips")
        except Exception as error:  # the library's own errors have no common class without it
            say(f"no figures of chips ({error})")

    def sample(self) -> Values:
        """Return what the chips count now; what one of them does not know is left out."""
        values: Values = {}
        for index, chip in enumerate(self._chips):
            for name, value in self._of(chip):
                values[key(name, str(index))] = value
        return values

    def _of(self, chip: Any) -> Iterator[tuple[str, float]]:
        nvml = self._nvml
        asked: tuple[tuple[str, Callable[[], float]], ...] = (
            ("chip_busy_ratio", lambda: nvml.nvmlDeviceGetUtilizationRates(chip).gpu / 100),
            ("chip_memory_used_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(chip).used),
            ("chip_power_watts", lambda: nvml.nvmlDeviceGetPowerUsage(chip) / 1e3),
            ("chip_temperature_celsius", lambda: nvml.nvmlDeviceGetTemperature(chip, 0)),
            ("chip_clock_hertz", lambda: nvml.nvmlDeviceGetClockInfo(chip, 1) * 1e6),
            (
                "chip_throttle_reasons",
                lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(chip),
            ),
            (
                "chip_ecc_uncorrected_total",
                lambda: nvml.nvmlDeviceGetTotalEccErrors(chip, 1, 0),
            ),
        )
        for name, ask in asked:
            with contextlib.suppress(Exception):  # not supported by this chip
                yield name, float(ask())


def host_samplers(say: Say) -> list[Sampler]:
    """Return what can be sampled of this host."""
    return [HostSampler(say), NicSampler(say), ChipSampler(say)]
