"""CPU, memory, pressure and disks of a host, as Linux counts them."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tutti.observe.figures import key
from tutti.observe.samplers.sampler import ROOT, Say, Values

_SECTOR_BYTES = 512


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
