"""NVIDIA's chips through their management library (NVML, nvidia-ml-py), where it is installed.

Load, memory, power, heat, clocks, memory errors; NVLinks with their bytes and errors; Xid errors as
events of the driver, beside what the kernel's log says of them (`xid`).
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from tutti.observe.figures import key
from tutti.observe.samplers.sampler import Say, Values
from tutti.observe.samplers.xid import XidEvents, XidTally

_KIB = 1024.0
_MOST_EVENTS = 64  # of Xid errors that are read at once
# reasons of a low clock that are the machine's fault, as bits of NVML's throttle reasons:
# hardware slowdown, software and hardware thermal slowdown, power brake
_HELD_BACK = 0x8 | 0x20 | 0x40 | 0x80
# figure of a link → field of the whole life of the driver, and what one count is
_LINK_FIELDS = {
    "chip_link_sent_bytes_total": ("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", _KIB),
    "chip_link_received_bytes_total": ("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", _KIB),
}
# figure of a link → counters of its errors
_LINK_ERRORS = {
    "chip_link_replays_total": ("NVML_NVLINK_ERROR_DL_REPLAY",),
    "chip_link_recoveries_total": ("NVML_NVLINK_ERROR_DL_RECOVERY",),
    "chip_link_crc_errors_total": (
        "NVML_NVLINK_ERROR_DL_CRC_FLIT",
        "NVML_NVLINK_ERROR_DL_CRC_DATA",
        "NVML_NVLINK_ERROR_DL_ECC_DATA",
    ),
}


class ChipSampler:
    """NVIDIA's chips; what one of them does not know is left out."""

    def __init__(
        self, say: Say = lambda _: None, library: Any = None, xids: XidTally | None = None
    ) -> None:
        self._chips: list[Any] = []
        self._links: dict[int, tuple[int, ...]] = {}
        self._tally = xids or XidTally()
        self._events: XidEvents | None = None
        try:
            self._nvml = library or importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            self._chips = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        except ImportError:
            say("nvidia-ml-py is not installed: no figures of NVIDIA's chips")
        except Exception as error:  # the library's own errors have no common class without it
            say(f"no figures of NVIDIA's chips ({error})")
        if not self._chips:
            return
        for index, chip in enumerate(self._chips):
            self._tally.add_chip(str(index), self._bus_of(chip))
            self._links[index] = self._links_of(chip)
        if not any(self._links.values()):
            say("no active NVLink")
        try:
            self._events = XidEvents(self._nvml, self._chips, self._tally)
        except Exception as error:
            say(f"the driver tells no Xid errors ({error}); what the kernel's log says counts")

    @property
    def is_any(self) -> bool:
        """Whether there is a chip to ask."""
        return bool(self._chips)

    def sample(self) -> Values:
        """Return what the chips count now."""
        if self._events is not None:
            self._events.read(_MOST_EVENTS)
        values = self._tally.values()
        for index, chip in enumerate(self._chips):
            for name, value in self._of(chip):
                values[key(name, str(index))] = value
            for link in self._links[index]:
                for name, value in self._of_link(chip, link):
                    values[key(name, f"{index}:{link}")] = value
        return values

    def _of(self, chip: Any) -> Iterator[tuple[str, float]]:
        nvml = self._nvml
        asked: tuple[tuple[str, Callable[[], float]], ...] = (
            ("chip_busy_ratio", lambda: nvml.nvmlDeviceGetUtilizationRates(chip).gpu / 100),
            ("chip_memory_used_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(chip).used),
            ("chip_power_watts", lambda: nvml.nvmlDeviceGetPowerUsage(chip) / 1e3),
            ("chip_temperature_celsius", lambda: nvml.nvmlDeviceGetTemperature(chip, 0)),
            ("chip_clock_hertz", lambda: nvml.nvmlDeviceGetClockInfo(chip, 1) * 1e6),
            ("chip_ecc_uncorrected_total", lambda: nvml.nvmlDeviceGetTotalEccErrors(chip, 1, 0)),
            ("chip_ecc_corrected_total", lambda: nvml.nvmlDeviceGetTotalEccErrors(chip, 0, 0)),
            ("chip_pcie_replays_total", lambda: nvml.nvmlDeviceGetPcieReplayCounter(chip)),
        )
        for name, ask in asked:
            with contextlib.suppress(Exception):  # not supported by this chip
                yield name, float(ask())
        with contextlib.suppress(Exception):
            reasons = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(chip))
            yield "chip_throttle_reasons", float(reasons)
            yield "chip_held_back_ratio", float(bool(reasons & _HELD_BACK))

    def _of_link(self, chip: Any, link: int) -> Iterator[tuple[str, float]]:
        nvml = self._nvml
        with contextlib.suppress(Exception):
            fields = [(getattr(nvml, field), link) for field, _ in _LINK_FIELDS.values()]
            answers = nvml.nvmlDeviceGetFieldValues(chip, fields)
            for (name, (_, unit)), one in zip(_LINK_FIELDS.items(), answers, strict=True):
                if one.nvmlReturn == 0:
                    yield name, float(one.value.ullVal) * unit
        for name, counters in _LINK_ERRORS.items():
            counts = []
            for counter in counters:
                with contextlib.suppress(Exception):
                    number = getattr(nvml, counter)
                    counts.append(nvml.nvmlDeviceGetNvLinkErrorCounter(chip, link, number))
            if counts:
                yield name, float(sum(counts))

    def _links_of(self, chip: Any) -> tuple[int, ...]:
        """Return the numbers of a chip's active links."""
        active = []
        for link in range(int(getattr(self._nvml, "NVML_NVLINK_MAX_LINKS", 18))):
            with contextlib.suppress(Exception):
                if self._nvml.nvmlDeviceGetNvLinkState(chip, link):
                    active.append(link)
        return tuple(active)

    def _bus_of(self, chip: Any) -> str:
        try:
            bus = self._nvml.nvmlDeviceGetPciInfo(chip).busId
        except Exception:
            return ""
        return bus.decode() if isinstance(bus, bytes) else str(bus)
