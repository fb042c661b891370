"""The parts that fabrics are built of, from a data file with the source of each figure."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Annotated

from tutti import files
from tutti.document import AtLeast, BytesPerSecond, Count, Place, Seconds, Watts, build_fields
from tutti.errors import InputError, hint

Price = Annotated[float, AtLeast(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """One kind of switch."""

    name: str
    ports: Count
    port_rate: BytesPerSecond
    price: Price
    watts: Watts
    latency_s: Seconds
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Its ports in words."""
        return f"{self.ports} × {self.port_rate * 8e-9:g} Gb/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Optics:
    """A transceiver, by what it carries."""

    price_per_gbps: Price
    watts_per_gbps: Price
    sources: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cable:
    """What lies between two transceivers, or a copper cable that needs none."""

    price: Price
    sources: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLatency:
    """What both NICs add to a message's way."""

    value: Seconds
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """All that can be bought."""

    switches: tuple[Switch, ...]
    optics: Optics
    fibre: Cable
    copper: Cable
    host_latency_s: HostLatency

    def switch(self, name: str) -> Switch:
        """Return a kind of switch by its name."""
        for switch in self.switches:
            if switch.name.casefold() == name.casefold():
                return switch
        names = [switch.name for switch in self.switches]
        raise InputError(f"no switch '{name}'; {hint(name, names)}")


@functools.cache
def parts() -> Parts:
    """Return the parts that ship with tutti."""
    text = resources.files("tutti.fabric").joinpath("parts.yaml").read_text(encoding="utf-8")
    return build_fields(Parts, files.parse_yaml(text, "parts.yaml"), Place("parts.yaml"))
