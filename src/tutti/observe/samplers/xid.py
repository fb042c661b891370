"""Xid errors of NVIDIA's driver, by chip: from the driver's events and from the kernel's log.

Both may tell of the same error, or one of them alone; of each chip and code the source that told of
more counts.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from tutti.observe.figures import key
from tutti.observe.samplers.sampler import ROOT, BackgroundSampler, Say, Values

_XID = re.compile(
    rb"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f]{2,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})[^)]*\): (\d+)"
)
_RECORD_BYTES = 8192  # the most that the kernel hands out at once
_MOST_RECORDS = 1000  # that are read per sample
_DMESG_S, _DMESG_SHARE, _LONGEST_S = 30.0, 0.01, 20.0


class XidTally:
    """How many Xid errors each chip had since the samplers were made."""

    def __init__(self) -> None:
        self._chips: dict[str, str] = {}  # label by PCI address
        self._labels: list[str] = []
        self._told: dict[str, Counter[tuple[str, int]]] = {}
        self._last: dict[str, int] = {}

    def add_chip(self, label: str, bus: str) -> None:
        """Know a chip by its PCI address."""
        self._labels.append(label)
        if bus:
            self._chips[_plain(bus)] = label

    def label(self, bus: str) -> str:
        """Return what a chip is called; one that nobody knows by its address."""
        return self._chips.get(_plain(bus), _plain(bus))

    def note(self, source: str, chip: str, code: int) -> None:
        """Take an error that a source tells of."""
        self._told.setdefault(source, Counter())[chip, code] += 1
        self._last[chip] = code

    def values(self) -> Values:
        """Return the counts of all chips, and the last code of those that had one."""
        most: Counter[tuple[str, int]] = Counter()
        for told in self._told.values():
            most |= told  # of each the greater count
        counts = dict.fromkeys(self._labels, 0)
        for (chip, _), count in most.items():
            counts[chip] = counts.get(chip, 0) + count
        values = {key("chip_xid_errors_total", chip): float(n) for chip, n in counts.items()}
        values |= {key("chip_last_xid_code", chip): float(c) for chip, c in self._last.items()}
        return values


def _plain(bus: str) -> str:
    """Return a PCI address as domain:bus:device, in small letters and with four digits first."""
    domain, _, rest = bus.casefold().partition(":")
    return f"{domain[-4:].rjust(4, '0')}:{rest.partition('.')[0]}"


class XidEvents:
    """The driver's events of critical Xid errors."""

    def __init__(self, nvml: Any, chips: list[Any], tally: XidTally) -> None:
        self._nvml, self._tally = nvml, tally
        self._set = nvml.nvmlEventSetCreate()
        for chip in chips:
            nvml.nvmlDeviceRegisterEvents(chip, nvml.nvmlEventTypeXidCriticalError, self._set)

    def read(self, most: int) -> None:
        """Take what came since the last call; where nothing did, the library raises a time-out."""
        for _ in range(most):
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._set, 0)
                chip = str(self._nvml.nvmlDeviceGetIndex(event.device))
            except Exception:  # the library's own errors have no common class without it
                return
            self._tally.note("driver", chip, int(event.eventData))


class KernelXids:
    """Xid errors in the kernel's ring, read as they come (/dev/kmsg), or now and then by dmesg."""

    def __init__(self, tally: XidTally, say: Say = lambda _: None, root: Path = ROOT) -> None:
        self._tally, self._descriptor = tally, -1
        self._printed: _Dmesg | None = None
        kmsg = root / "dev/kmsg"
        try:
            self._descriptor = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._descriptor, 0, os.SEEK_END)  # what was before is no matter of this run
        except OSError as error:
            self._printed = _Dmesg(tally, say, f"{kmsg}: {error.strerror}")

    def sample(self) -> Values:
        """Return nothing of its own: the tally has it."""
        if self._printed is not None:
            return self._printed.sample()
        for _ in range(_MOST_RECORDS):
            try:
                record = os.read(self._descriptor, _RECORD_BYTES)
            except BrokenPipeError:  # overwritten meanwhile: the next read goes on
                continue
            except OSError:  # nothing new
                break
            if not record:
                break
            for bus, code in _XID.findall(record):
                self._tally.note("kernel", self._tally.label(bus.decode()), int(code))
        return {}

    def close(self) -> None:
        """Read no more."""
        if self._printed is not None:
            self._printed.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _Dmesg(BackgroundSampler):
    """The same by `dmesg`, for who may not read the ring itself."""

    def __init__(self, tally: XidTally, say: Say, why: str) -> None:
        super().__init__("dmesg", every_s=_DMESG_S, share=_DMESG_SHARE)
        self._tally, self._say, self._why = tally, say, why
        self._before: Counter[tuple[bytes, bytes]] | None = None
        self._printed()  # where it may not be asked, that is said now

    def ask(self) -> Values | None:
        """Take what is new since the last time."""
        text = self._printed()
        if text is None:
            return None
        now = Counter(_XID.findall(text))
        new = now - self._before if self._before is not None else Counter[tuple[bytes, bytes]]()
        self._before = now
        for (bus, code), count in new.items():
            for _ in range(count):
                self._tally.note("kernel", self._tally.label(bus.decode()), int(code))
        return {}

    def _printed(self) -> bytes | None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(["dmesg"], capture_output=True, timeout=_LONGEST_S, check=False)
            if done.returncode == 0:
                return done.stdout
        if self._why:
            self._say(f"the kernel's log cannot be read ({self._why}; dmesg fails, too)")
            self._why = ""
        return None
