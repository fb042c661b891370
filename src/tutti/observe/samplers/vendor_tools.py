"""Chips of Ascend and Kunlun, as `npu-smi` and `xpu-smi` print them, beside the samples.

Such a tool takes a second and much of a core, so it is asked seldom and for at most a hundredth of
the time; between two answers the last one stands.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable

from tutti.hardware import smi
from tutti.hardware.discover import Run, run_tool
from tutti.observe.figures import key
from tutti.observe.samplers.sampler import BackgroundSampler, Say, Values

_EVERY_S, _SHARE = 10.0, 0.01
_ECC_EVERY = 6  # rounds: counters of memory errors need a call per card
Finds = Callable[[str], object]


class VendorTools(BackgroundSampler):
    """Load, memory, heat, power and memory errors of chips that have no library to ask."""

    def __init__(
        self,
        say: Say = lambda _: None,
        run: Run = run_tool,
        finds: Finds = shutil.which,
        *,
        every_s: float = _EVERY_S,
    ) -> None:
        super().__init__("vendor tools", every_s=every_s, share=_SHARE)
        self._run_tool, self._say = run, say
        self._tools = [tool for tool in ("npu-smi", "xpu-smi", "xpu_smi") if finds(tool)]
        self._silent: set[str] = set()
        self._ecc: dict[str, smi.MemoryErrors] = {}
        self._rounds = 0

    @property
    def is_any(self) -> bool:
        """Whether there is a tool to ask."""
        return bool(self._tools)

    def ask(self) -> Values | None:
        """Ask every tool that is there."""
        if not self._tools:
            return None
        values: Values = {}
        for tool in self._tools:
            readings = self._npu() if tool == "npu-smi" else self._xpu(tool)
            for name, reading in readings:
                values |= _figures(name, reading)
            if not readings and tool not in self._silent:
                self._say(f"{tool} is installed, but shows no chip: no figures of them")
                self._silent.add(tool)
        self._rounds += 1
        return values

    def _npu(self) -> list[tuple[str, smi.Reading]]:
        readings = smi.npu_readings(self._run_tool(["npu-smi", "info"]))
        if self._rounds % _ECC_EVERY == 0:
            for card in sorted({reading.card for reading in readings}):
                text = self._run_tool(["npu-smi", "info", "-t", "ecc", "-i", str(card)])
                for chip, errors in smi.npu_memory_errors(text).items():
                    self._ecc[f"{card}:{chip}"] = errors
        return [
            (f"npu-{r.index}", r.with_errors(self._ecc.get(f"{r.card}:{r.chip}"))) for r in readings
        ]

    def _xpu(self, tool: str) -> list[tuple[str, smi.Reading]]:
        return [(f"xpu-{r.index}", r) for r in smi.xpu_readings(self._run_tool([tool]))]


def _figures(name: str, reading: smi.Reading) -> Values:
    errors = reading.errors
    known: Iterable[tuple[str, float | None]] = (
        ("chip_busy_ratio", reading.busy_ratio),
        ("chip_memory_used_bytes", reading.memory_used_bytes),
        ("chip_power_watts", reading.power_watts),
        ("chip_temperature_celsius", reading.temperature_celsius),
        ("chip_unwell_ratio", None if reading.well is None else float(not reading.well)),
        ("chip_ecc_uncorrected_total", None if errors is None else errors.uncorrected),
        ("chip_ecc_corrected_total", None if errors is None else errors.corrected),
    )
    return {key(figure, name): float(value) for figure, value in known if value is not None}
