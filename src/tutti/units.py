"""Quantities as people write them: "80 GiB", "200 Gb/s", "312 TFLOP/s", "4 us".

Inside tutti every figure is a plain number in the base unit of its dimension: bytes, bytes per
second, FLOP per second, seconds, watts, hertz. This module converts at the edge, both ways.
"""

from __future__ import annotations

import math
import re
from typing import Literal

from tutti.errors import hint

Dimension = Literal["bytes", "bytes/s", "flop/s", "s", "W"]

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}


def _table(dimension: Dimension) -> dict[str, float]:
    table: dict[str, float] = {}
    if dimension in ("bytes", "bytes/s"):
        suffix = "" if dimension == "bytes" else "/s"
        for prefix, factor in {**_DECIMAL, **_BINARY}.items():
            table[f"{prefix}B{suffix}"] = factor
            if dimension == "bytes/s":  # network rates are given in bits
                table[f"{prefix}b/s"] = factor / 8
                table[f"{prefix}bps"] = factor / 8
    elif dimension == "flop/s":
        for prefix, factor in _DECIMAL.items():
            for name in ("FLOP/s", "FLOPS", "FLOPs", "OP/s", "OPS"):
                table[f"{prefix}{name}"] = factor
    elif dimension == "s":
        table = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
    else:
        table = {"W": 1.0, "kW": 1e3, "MW": 1e6}
    return table


_UNITS: dict[Dimension, dict[str, float]] = {
    dimension: _table(dimension) for dimension in ("bytes", "bytes/s", "flop/s", "s", "W")
}
_QUANTITY = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([A-Za-zµ/]*)\s*")
_EXAMPLE: dict[Dimension, str] = {
    "bytes": "80 GiB",
    "bytes/s": "200 Gb/s",
    "flop/s": "312 TFLOP/s",
    "s": "5 us",
    "W": "400 W",
}


def parse(text: str, dimension: Dimension) -> float:
    """Return `text` in the base unit of `dimension`; raise ValueError with the remedy."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"is '{text}'; write it like '{_EXAMPLE[dimension]}'")
    number, unit = match.groups()
    if not unit:
        return float(number)
    units = _UNITS[dimension]
    if unit not in units:
        raise ValueError(f"is '{text}': unknown unit '{unit}'; {hint(unit, units)}")
    scale = units[unit]
    # Dividing by a whole number is exact where multiplying by 1e-6 is not: "5 us" is 5e-06.
    value = float(number) * scale if scale >= 1 else float(number) / round(1 / scale)
    if not math.isfinite(value):
        raise ValueError(f"is '{text}', which is not a finite number")
    return value


def bytes_text(value: float) -> str:
    """Format bytes with binary prefixes: 80.0 GiB."""
    size = float(value)
    for prefix in ("", "Ki", "Mi", "Gi", "Ti"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if not prefix else f"{size:.1f} {prefix}B"
        size /= 1024
    return f"{size:.1f} PiB"


def _scaled(value: float, unit: str) -> str:
    size = float(value)
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(size) < 1000:
            return f"{size:.4g} {prefix}{unit}"
        size /= 1000
    return f"{size:.4g} E{unit}"


def rate_text(value: float) -> str:
    """Format bytes per second with decimal prefixes: 25 GB/s."""
    return _scaled(value, "B/s")


def flops_text(value: float) -> str:
    """Format FLOP per second: 312 TFLOP/s."""
    return _scaled(value, "FLOP/s")


def count_text(value: float) -> str:
    """Format a count of parameters or tokens: 6.74 B."""
    size = float(value)
    for prefix in ("", " K", " M", " B", " T"):
        if abs(size) < 1000:
            return f"{size:.4g}{prefix}"
        size /= 1000
    return f"{size:.4g} Q"


def many(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun: 1 chip, 2 chips, 1,024 chips."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def seconds_text(value: float) -> str:
    """Format seconds with the unit that keeps the number readable: 12.3 ms."""
    if value == 0:
        return "0 s"
    for limit, factor, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if abs(value) < limit:
            return f"{value * factor:.4g} {unit}"
    if abs(value) < 120:
        return f"{value:.4g} s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 120:
        return f"{minutes:.0f} min {seconds:.0f} s"
    return f"{value / 3600:.1f} h"
