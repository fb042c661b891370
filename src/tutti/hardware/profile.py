"""What was measured of a chip under a software stack.

A `Profile` is a versioned JSON file: operator × shape → seconds, links → latency and bandwidth, the
launch floor. Who measures and who predicts from it live elsewhere. Where nothing was measured,
`Profile.nominal` stands in, and `is_measured` says so. Measured profiles ship in `profiles/`.
"""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated

from tutti import document, files
from tutti.document import (
    Above,
    AtLeast,
    AtMost,
    BytesPerSecond,
    Count,
    Natural,
    Place,
    Quantity,
    Seconds,
    build_fields,
)
from tutti.errors import InputError, hint
from tutti.hardware.chip import Chip, Dtype
from tutti.hardware.storage import StorageTier

FORMAT = 2
# 2 adds what a measurement says of itself (`spread`, `repeats`, `issue_s`, `kernel`); all optional.
READ = (1, 2)
_READ_TEXT = " and ".join(map(str, READ))


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTime:
    """How long one operator took on one shape (median of repeats)."""

    operator: str
    """With its direction: "linear.forward", "rms_norm.backward"."""
    dtype: Dtype
    shape: tuple[Count, ...]
    seconds: Annotated[float, Quantity("s"), Above(0)]
    spread: Annotated[float, AtLeast(0)] = 0.0
    """Half the distance between the quartiles of the repeats, as a part of the median."""
    repeats: Natural = 0
    """How many samples the median is of."""
    issue_s: Seconds = 0.0
    """What the host needs to issue it; 0 where the host computes itself."""
    kernel: str = ""
    """The implementation that ran."""

    @property
    def key(self) -> tuple[str, Dtype, tuple[int, ...]]:
        """What was measured."""
        return (self.operator, self.dtype, self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFigure:
    """What one kind of link reached: the α and β of α + bytes ÷ β, per direction."""

    kind: str
    """"memory", "host_to_device", "device_to_host", or a medium such as "NVLink"."""
    latency_s: Seconds
    bandwidth: BytesPerSecond


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTime:
    """How long one collective program took on one shape of group (median of repeats)."""

    operation: str
    group: str
    """The shape of the group, as `cost.tuned.group_shape` writes it."""
    bytes: Annotated[float, Quantity("bytes"), Above(0)]
    """Of all sections together."""
    algorithm: str
    chunks: Count = 1
    seconds: Annotated[float, Quantity("s"), Above(0)]


class StorageAction(StrEnum):
    """What was done to storage."""

    WRITE = "write"  # a large file, until it is on the disk
    READ = "read"  # a large file, from the disk
    WRITE_SMALL = "write_small"  # a file of 4 KiB each, until it is on the disk
    READ_SMALL = "read_small"  # 4 KiB from anywhere in a large file
    FLUSH = "flush"  # an fsync behind 4 KiB more
    CHECKSUM = "checksum"  # no storage: what a checkpoint's checksums cost the host


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFigure:
    """What processes of one node reached together (median of repeats)."""

    tier: StorageTier
    action: StorageAction
    processes: Count
    bytes: Annotated[float, Quantity("bytes"), Above(0)]
    """Of one operation."""
    seconds: Annotated[float, Quantity("s"), Above(0)]
    """Of one operation of one process, while the others are at it, too."""
    bandwidth: BytesPerSecond
    """Of all processes together."""
    beyond_cache: bool = True
    """Whether the bytes came from the storage; false where the system's memory kept them."""

    @property
    def key(self) -> tuple[StorageTier, StorageAction, int]:
        """What was measured."""
        return (self.tier, self.action, self.processes)


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
    sustained: Annotated[float, AtLeast(1)] = 1.0
    """How many times longer products take when they follow each other for seconds: a chip that
    meets its power limit slows down."""
    graph_share: Annotated[float, Above(0), AtMost(1)] = 1.0
    """What of the time to issue a block is left where it runs as a graph; 1 without graphs."""
    served_graphs: bool = False
    """Whether operators of servers were timed inside graphs, as steps then run."""
    served_gap_s: Seconds = 0.0
    """What lies between two operators of a server's step, beside what they take alone."""
    operators: tuple[OperatorTime, ...] = ()
    links: tuple[LinkFigure, ...] = ()
    collectives: tuple[CollectiveTime, ...] = ()
    storage: tuple[StorageFigure, ...] = ()
    extends: str = ""
    """A profile that ships, of which the operators are taken that this one does not hold."""
    needs: str = ""
    """The package whose kernels were measured, where the stack does not always have it."""

    def __post_init__(self) -> None:
        if self.format not in READ:
            raise ValueError(
                f"'format' is {self.format}, but this tutti reads {_READ_TEXT}; "
                "measure again with it"
            )
        if self.date:
            try:
                datetime.datetime.fromisoformat(self.date)
            except ValueError:
                raise ValueError(f"'date' is '{self.date}'; write it like 2026-01-31") from None
        keys = [o.key for o in self.operators]
        if len(set(keys)) != len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"'operators' holds {twice[0]} {list(twice[2])} twice")
        kinds = [link.kind for link in self.links]
        if len(set(kinds)) != len(kinds):
            raise ValueError(f"'links' names a kind twice among {', '.join(kinds)}")

    @property
    def is_measured(self) -> bool:
        """Whether anything here was measured at all."""
        return bool(
            self.date and (self.operators or self.links or self.collectives or self.storage)
        )

    @property
    def is_of_storage_alone(self) -> bool:
        """Whether only storage was measured: it says nothing of a chip."""
        return bool(self.storage) and not (self.operators or self.links or self.collectives)

    def link(self, kind: str) -> LinkFigure | None:
        """Return the figures of a kind of link, if measured."""
        return next((link for link in self.links if link.kind == kind), None)

    def storage_figure(
        self, tier: StorageTier, action: StorageAction, processes: int | None = None
    ) -> StorageFigure | None:
        """Return what was measured of a tier by so many processes; by the most, if none is said."""
        figures = [f for f in self.storage if (f.tier, f.action) == (tier, action)]
        if processes is not None:
            figures = [f for f in figures if f.processes <= processes] or figures[:1]
        return max(figures, key=lambda f: f.processes, default=None)

    def with_storage(self, figures: Collection[StorageFigure]) -> Profile:
        """Return the profile with what was measured of a tier, in place of what was known of it."""
        tiers = {figure.tier for figure in figures}
        kept = tuple(f for f in self.storage if f.tier not in tiers)
        return replace(self, storage=(*kept, *figures))

    @property
    def dtypes(self) -> tuple[Dtype, ...]:
        """The number formats in which operators were measured."""
        dtypes = {o.dtype for o in self.operators}
        return tuple(dtype for dtype in Dtype if dtype in dtypes)

    def without(self, shapes: Collection[tuple[str, tuple[int, ...]]]) -> Profile:
        """Return the profile as if these (operator, shape) had not been measured."""
        gone = set(shapes)
        kept = tuple(o for o in self.operators if (o.operator, o.shape) not in gone)
        return replace(self, operators=kept)

    def without_operators(self, names: Collection[str]) -> Profile:
        """Return the profile as if nothing had been measured of some operators."""
        gone = set(names)
        kept = tuple(o for o in self.operators if o.operator.partition(".")[0] not in gone)
        return replace(self, operators=kept)

    def slowed(self, chip: str, factor: float) -> Profile:
        """Return what the profile of a chip would be that takes `factor` times as long."""
        return replace(
            self,
            chip=chip,
            origin=f"{self.origin}, {factor:g} times slower (emulated)",
            launch_floor_s=self.launch_floor_s * factor,
            operators=tuple(
                replace(o, seconds=o.seconds * factor, issue_s=o.issue_s * factor)
                for o in self.operators
            ),
            links=tuple(
                replace(link, latency_s=link.latency_s * factor, bandwidth=link.bandwidth / factor)
                if link.kind == "memory"
                else link
                for link in self.links
            ),
        )

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
        if isinstance(value, dict) and value["format"] not in READ:
            version = value["format"]
            raise place.key("format").value_error(
                f"is {document.shown(version)}, but this tutti reads {_READ_TEXT}; "
                "measure again with it"
            )
        loaded: Profile = build_fields(cls, value, place)
        return _extended(loaded, shipped_profiles()) if loaded.extends else loaded

    @classmethod
    def find(cls, name: str) -> Profile:
        """Return the profile of a file, or one that ships by its name ("h200")."""
        known = shipped_profiles()
        if name.casefold() in known and not Path(name).exists():
            return known[name.casefold()]
        if not Path(name).suffix and not Path(name).exists():
            raise InputError(f"profile '{name}': no such file, and none ships; {hint(name, known)}")
        return cls.load(Path(name))

    def save(self, path: Path) -> None:
        """Write the profile as a whole or not at all."""
        written = {"format": self.format, **document.plain(self)}
        rows = {
            name: written.pop(name)
            for name in ("operators", "links", "collectives", "storage")
            if name in written
        }
        head = json.dumps(written, indent=1, ensure_ascii=False).removesuffix("\n}")
        # One measurement per line: thousands of them stay readable, and differences small.
        for name, values in rows.items():
            lines = ",\n".join(f"  {json.dumps(v, ensure_ascii=False)}" for v in values)
            head += f',\n "{name}": [\n{lines}\n ]'
        files.write_text(path, head + "\n}\n")


@functools.lru_cache(maxsize=1)
def shipped_profiles() -> Mapping[str, Profile]:
    """Return the measured profiles that ship with the package, by file name."""
    folder = resources.files("tutti.hardware") / "profiles"
    profiles: dict[str, Profile] = {}
    if folder.is_dir():
        for entry in sorted(folder.iterdir(), key=lambda e: e.name):
            if entry.name.endswith(".json"):
                value = files.parse_json(entry.read_text(encoding="utf-8"), entry.name)
                name = entry.name.removesuffix(".json")
                profiles[name.casefold()] = build_fields(Profile, value, Place(entry.name))
    return {name: _extended(profile, profiles) for name, profile in profiles.items()}


def _extended(profile: Profile, known: Mapping[str, Profile]) -> Profile:
    """Return a profile with the operators of the one that it extends."""
    if not profile.extends:
        return profile
    own = {row.operator.partition(".")[0] for row in profile.operators}
    if profile.extends not in known:
        raise InputError(
            f"profile of {profile.chip}: 'extends' is '{profile.extends}'; "
            f"{hint(profile.extends, known)}"
        )
    base = known[profile.extends].without_operators(own)
    return replace(profile, extends="", operators=(*base.operators, *profile.operators))


def profiles_here() -> tuple[Profile, ...]:
    """Return what ships, one profile of each chip, for the packages that are installed here."""
    chosen: dict[str, Profile] = {}
    for profile in sorted(shipped_profiles().values(), key=lambda profile: bool(profile.needs)):
        if not profile.needs or _installed(profile.needs):
            chosen[profile.chip] = profile
    return tuple(chosen.values())


def shipped_profile(chip: str) -> Profile | None:
    """Return what ships of a chip, of those."""
    return next((profile for profile in profiles_here() if profile.chip == chip), None)


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
