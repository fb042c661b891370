"""A chip: what one kind of accelerator can do at best, and who says so.

Owns `Chip` and `Dtype`. Peaks are *dense* (no structured sparsity) FLOP per second. The figures are
nominal unless `measured` says otherwise; what a machine really reaches is a `Profile`'s business.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from tutti.document import (
    Above,
    AtLeast,
    AtMost,
    BytesPerSecond,
    Count,
    FlopPerSecond,
    Place,
    Quantity,
    Seconds,
    Watts,
    build_fields,
)
from tutti.errors import InputError

LARGEST_OVERRUN = 0.05
"""A run on emulated chips counts if the host fell behind them by no larger share of their time."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")


class Dtype(StrEnum):
    """A number format in which a chip multiplies matrices."""

    FP64 = "fp64"
    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    FP4 = "fp4"
    INT8 = "int8"

    @property
    def num_bytes(self) -> float:
        """Bytes that one number takes in memory (tf32 is stored as fp32)."""
        return _BYTES[self]


_BYTES = {
    Dtype.FP64: 8.0,
    Dtype.FP32: 4.0,
    Dtype.TF32: 4.0,
    Dtype.BF16: 2.0,
    Dtype.FP16: 2.0,
    Dtype.FP8: 1.0,
    Dtype.FP4: 0.5,
    Dtype.INT8: 1.0,
}

# What a chip computes in instead of a format it lacks, best first. Only formats that lose no more
# than the wanted one: bf16 and fp16 stand in for each other (fp16 then needs loss scaling).
_STAND_INS: Mapping[Dtype, tuple[Dtype, ...]] = {
    Dtype.FP4: (Dtype.FP8, Dtype.BF16, Dtype.FP16),
    Dtype.FP8: (Dtype.BF16, Dtype.FP16),
    Dtype.BF16: (Dtype.FP16, Dtype.FP32),
    Dtype.FP16: (Dtype.BF16, Dtype.FP32),
    Dtype.TF32: (Dtype.FP32,),
}

FIGURES = (
    "peak",
    "memory_bytes",
    "memory_bandwidth",
    "compute_units",
    "sustained",
    "launch_overhead_s",
    "watts",
)
# Figures that have a default, so that a chip without a source for them is still "nominal".
_REFINEMENTS = ("compute_units", "sustained", "launch_overhead_s")


def check_name(name: str, what: str) -> None:
    """Raise ValueError unless `name` can stand in an id such as "pool/node/slot"."""
    if not NAME.fullmatch(name):
        raise ValueError(f"the {what} name '{name}' must be of letters, digits and _ . + - only")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One kind of accelerator, by its best-case figures."""

    name: str
    vendor: str
    architecture: str = ""
    peak: Mapping[Dtype, FlopPerSecond]
    memory_bytes: Annotated[float, Quantity("bytes"), Above(0)]
    memory_bandwidth: BytesPerSecond
    compute_units: Count = 100
    """Processors that work on tiles of a product at the same time: SMs, CUs, AI cores."""
    sustained: Annotated[float, Above(0), AtMost(1)] = 1.0
    """Share of the peak that the power cap leaves under long dense products."""
    launch_overhead_s: Seconds = 5e-6
    watts: Watts | None = None
    measured: bool = False
    emulated: bool = False
    slowdown: Annotated[float, AtLeast(1)] | None = None
    """An emulated chip is a core of the host, so many times slower; None: its times are declared,
    by the cost model."""
    aliases: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    def __post_init__(self) -> None:
        check_name(self.name, "chip")
        if not self.peak:
            raise ValueError("'peak' is empty; give at least one, such as 'bf16: 312 TFLOP/s'")
        if self.slowdown is not None and not self.emulated:
            raise ValueError("'slowdown' is for emulated chips; add 'emulated: true' or drop it")
        for figure in self.sources:
            head, _, dtype = figure.partition(".")
            if head not in FIGURES or (dtype and (head != "peak" or dtype not in self.peak)):
                raise ValueError(
                    f"'sources' names '{figure}', which is no figure of this chip; "
                    f"figures: {', '.join(FIGURES)}, peak.DTYPE"
                )

    def __hash__(self) -> int:
        return hash((self.name, self.vendor, self.memory_bytes, self.memory_bandwidth))

    @classmethod
    def from_document(cls, value: object, place: Place) -> Chip:
        """Build a chip from its written form; a chip that was looked up by name passes through."""
        return value if isinstance(value, Chip) else build_fields(cls, value, place)

    def supports(self, dtype: Dtype) -> bool:
        """Tell whether the chip multiplies matrices in `dtype` itself."""
        return dtype in self.peak

    def compute_dtype(self, wanted: Dtype) -> Dtype | None:
        """Return `wanted`, or the format the chip would use instead; None if there is none."""
        for dtype in (wanted, *_STAND_INS.get(wanted, ())):
            if dtype in self.peak:
                return dtype
        return None

    def peak_flops(self, dtype: Dtype, *, fallback: bool = False) -> float:
        """Return the dense peak in `dtype`; with `fallback`, that of the format used instead."""
        used = self.compute_dtype(dtype) if fallback else dtype
        if used is None or used not in self.peak:
            has = ", ".join(d.value for d in Dtype if d in self.peak)
            raise InputError(f"chip '{self.name}' has no {dtype.value}; it has {has}")
        return self.peak[used]

    def source(self, figure: str) -> str:
        """Return who states a figure, such as "peak", "peak.fp8" or "memory_bytes"."""
        whole = figure.partition(".")[0]
        return self.sources.get(figure) or self.sources.get(whole) or "not stated"

    @property
    def figures(self) -> tuple[str, ...]:
        """The names of the figures this chip carries, each of which should have a source."""
        peaks = tuple(f"peak.{d.value}" for d in Dtype if d in self.peak)
        return (*peaks, *(f for f in FIGURES[1:] if f != "watts" or self.watts is not None))

    @property
    def basis(self) -> str:
        """How far the figures can be trusted, in a word or two."""
        if self.emulated:
            return "emulated"
        if self.measured:
            return "measured"
        key = (f for f in self.figures if f not in _REFINEMENTS)
        assumed = any(self.source(f).startswith("assumed") for f in key)
        return "partly assumed" if assumed else "nominal"
