"""What was measured of a chip under a software stack.

A `Profile` is a versioned JSON file: operator × shape → seconds, links → latency and bandwidth, the
launch floor. Who measures and who predicts from it live elsewhere. Where nothing was measured,
`Profile.nominal` stands in, and `is_measured` says so.
"""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tutti import document, files
from tutti.document import Above, BytesPerSecond, Count, Place, Quantity, Seconds, build_fields
from tutti.hardware.chip import Chip, Dtype

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTime:
    """How long one operator took on one shape (median of repeats)."""

    operator: str
    dtype: Dtype
    shape: tuple[Count, ...]
    seconds: Annotated[float, Quantity("s"), Above(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFigure:
    """What one kind of link reached: the α and β of α + bytes ÷ β, per direction."""

    kind: str
    """"memory", "host_to_device", "device_to_host", or a medium such as "NVLink"."""
    latency_s: Seconds
    bandwidth: BytesPerSecond


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measured figures of one chip under one software stack."""

    format: int = FORMAT
    chip: str
    stack: str = ""
    date: str = ""
    """ISO 8601; empty when nothing was measured."""
    origin: str
    """Which command, machine or publication the figures come from."""
    launch_floor_s: Seconds
    operators: tuple[OperatorTime, ...] = ()
    links: tuple[LinkFigure, ...] = ()

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(
                f"'format' is {self.format}, but this tutti reads {FORMAT}; measure again with it"
            )
        if self.date:
            try:
                datetime.datetime.fromisoformat(self.date)
            except ValueError:
                raise ValueError(f"'date' is '{self.date}'; write it like 2026-01-31") from None
        keys = [(o.operator, o.dtype, o.shape) for o in self.operators]
        if len(set(keys)) != len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"'operators' holds {twice[0]} {list(twice[2])} twice")
        kinds = [link.kind for link in self.links]
        if len(set(kinds)) != len(kinds):
            raise ValueError(f"'links' names a kind twice among {', '.join(kinds)}")

    @property
    def is_measured(self) -> bool:
        """Whether anything here was measured at all."""
        return bool(self.date and (self.operators or self.links))

    def link(self, kind: str) -> LinkFigure | None:
        """Return the figures of a kind of link, if measured."""
        return next((link for link in self.links if link.kind == kind), None)

    @classmethod
    def nominal(cls, chip: Chip) -> Profile:
        """Return what stands in for a profile that nobody measured."""
        return cls(
            chip=chip.name,
            origin="nominal, not measured: the catalog's figures",
            launch_floor_s=chip.launch_overhead_s,
        )

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read a profile; anything wrong is one line."""
        value = files.read_file(path)
        place = Place(path.name)
        # The version decides how to read the rest, so it is looked at first.
        if isinstance(value, dict) and "format" not in value:
            raise place.error(f"'format' is missing; a profile begins with \"format\": {FORMAT}")
        if isinstance(value, dict) and value["format"] != FORMAT:
            found = value["format"]
            raise place.key("format").value_error(
                f"is {document.shown(found)}, but this tutti reads {FORMAT}; measure again with it"
            )
        return build_fields(cls, value, place)

    def save(self, path: Path) -> None:
        """Write the profile as a whole or not at all."""
        written = {"format": self.format, **document.plain(self)}
        files.write_text(path, json.dumps(written, indent=1, ensure_ascii=False) + "\n")
