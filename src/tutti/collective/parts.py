"""Parts: the rule by which a team's data are divided among its members.

A rule names thousands of parts in a few words; nothing is listed until somebody asks for the part
of one member. `Cut`, `Owned` and `Pieces` give each member a part; `Blocks` and `Reshard` give
each *pair* of members one, which is what an all-to-all moves.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any, Literal

from tutti.collective.notation import read_numbers, runs, write_numbers
from tutti.collective.slices import ZERO, Part, Slice, join, section
from tutti.document import Place, build, plain, shown
from tutti.errors import hint

Members = Sequence[int]


@functools.lru_cache(maxsize=4096)
def fences(weights: tuple[int, ...]) -> tuple[Fraction, ...]:
    """Return the cut points of 0..1 in proportion to the weights: one more than there are."""
    total = sum(weights)
    return (ZERO, *(Fraction(reached, total) for reached in accumulate(weights)))


def _interval(weights: tuple[int, ...], index: int, size: int) -> tuple[Fraction, Fraction]:
    """Return what the `index`-th of `size` gets of 0..1, evenly where no weights are given."""
    if not weights:
        return Fraction(index, size), Fraction(index + 1, size)
    cuts = fences(weights)
    return cuts[index], cuts[index + 1]


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """Cut `whole` among the members, in proportion to `weights` (none given: evenly)."""

    whole: Part
    weights: tuple[int, ...] = ()

    def num_parts(self, members: Members) -> int:
        """Return how many parts the rule gives."""
        return len(self.weights) or len(members)

    def part(self, members: Members, index: int) -> Part:
        """Return the part of the member at `index`."""
        start, stop = _interval(self.weights, index, len(members))
        return tuple(piece.cut(start, stop) for piece in self.whole)


@dataclasses.dataclass(frozen=True, slots=True)
class Owned:
    """Each member has the section of its own number."""

    def num_parts(self, members: Members) -> int:
        """Return how many parts the rule gives."""
        return len(members)

    def part(self, members: Members, index: int) -> Part:
        """Return the part of the member at `index`."""
        return (section(members[index]),)


@dataclasses.dataclass(frozen=True, slots=True)
class Pieces:
    """Each member's part, written out."""

    parts: tuple[Part, ...]

    def num_parts(self, members: Members) -> int:  # noqa: ARG002 - the rules' common signature
        """Return how many parts the rule gives."""
        return len(self.parts)

    def part(self, members: Members, index: int) -> Part:  # noqa: ARG002
        """Return the part of the member at `index`."""
        return self.parts[index]


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """From member i to j: the all-to-all blocks from all `sources[i]` to all `targets[j]`.

    None given: the member itself. The block from s to t is section s·n + t of a group of n.
    """

    sources: tuple[tuple[int, ...], ...] = ()
    targets: tuple[tuple[int, ...], ...] = ()

    def num_parts(self, members: Members) -> int:
        """Return how many members the rule has."""
        return len(self.sources) or len(self.targets) or len(members)

    def sources_of(self, members: Members, index: int) -> tuple[int, ...]:
        """Return the seats whose data the member at `index` sends."""
        return self.sources[index] if self.sources else (members[index],)

    def targets_of(self, members: Members, index: int) -> tuple[int, ...]:
        """Return the seats whose data the member at `index` receives."""
        return self.targets[index] if self.targets else (members[index],)

    def block(self, members: Members, source: int, target: int, size: int) -> Part:
        """Return what goes from one member (by index) to another in a group of `size`."""
        froms = self.sources_of(members, source)
        tos = self.targets_of(members, target)
        if len(tos) == 1:
            return tuple(_scaled(run, size, tos[0]) for run in runs(froms))
        return tuple(_scaled(run, 1, s * size) for s in froms for run in runs(tos))


def _scaled(run: range, factor: int, offset: int) -> Slice:
    first, step = run.start * factor + offset, run.step * factor
    return Slice(range(first, first + step * len(run), step))


@dataclasses.dataclass(frozen=True, slots=True)
class Reshard:
    """Members exchange sections for cuts: who holds section i gives j the j-th cut of it.

    Toward "sections" it is the other way round: who holds i's cut of all gives j its section's.
    """

    toward: Literal["cuts", "sections"]
    weights: tuple[int, ...] = ()

    def num_parts(self, members: Members) -> int:
        """Return how many members the rule has."""
        return len(self.weights) or len(members)

    def block(self, members: Members, source: int, target: int, size: int) -> Part:  # noqa: ARG002
        """Return what goes from one member (by index) to another."""
        whose, cut = (source, target) if self.toward == "cuts" else (target, source)
        start, stop = _interval(self.weights, cut, len(members))
        return (section(members[whose]).cut(start, stop),)


PartRule = Cut | Owned | Pieces  # a part for each member
PairRule = Blocks | Reshard  # a part for each pair of members
Parts = PartRule | PairRule


def whole(parts: PartRule, members: Members) -> Part:
    """Return all parts of a rule together."""
    if isinstance(parts, Cut):
        return parts.whole
    return join(piece for i in range(len(members)) for piece in parts.part(members, i))


# --- documents -------------------------------------------------------------------------------


def write_parts(parts: Parts) -> dict[str, Any]:
    """Return a rule as keys of its team: the first key tells which rule it is."""
    match parts:
        case Cut():
            return {"cut": plain(parts.whole)} | _write_weights(parts.weights)
        case Owned():
            return {"owned": True}
        case Pieces():
            return {"pieces": plain(parts.parts)}
        case Reshard():
            return {"reshard": parts.toward} | _write_weights(parts.weights)
        case Blocks():
            sets = {"sources": parts.sources, "targets": parts.targets}
            return {"blocks": {k: [write_numbers(s) for s in v] for k, v in sets.items() if v}}


def _write_weights(weights: tuple[int, ...]) -> dict[str, Any]:
    return {"weights": list(weights)} if weights else {}


_KEYS = ("cut", "owned", "pieces", "reshard", "blocks")


def read_parts(fields: dict[str, object], place: Place) -> Parts:
    """Build a rule from the keys that `write_parts` wrote; they are taken out of `fields`."""
    keys = [key for key in _KEYS if key in fields]
    if len(keys) != 1:
        raise place.error(f"needs exactly one of {', '.join(_KEYS)}; found {len(keys)}")
    key = keys[0]
    value = fields.pop(key)
    weights: tuple[int, ...] = ()
    if key in ("cut", "reshard") and "weights" in fields:
        weights = _weights(fields.pop("weights"), place.key("weights"))
    match key:
        case "cut":
            return Cut(build(Part, value, place.key(key)), weights)
        case "owned" if value is True:
            return Owned()
        case "pieces":
            return Pieces(build(tuple[Part, ...], value, place.key(key)))
        case "reshard" if value in ("cuts", "sections"):
            return Reshard("cuts" if value == "cuts" else "sections", weights)
        case "blocks":
            return _read_blocks(value, place.key(key))
    raise place.value_error(f"has '{key}' as {shown(value)}, which is no rule")


def _weights(value: object, place: Place) -> tuple[int, ...]:
    weights = build(tuple[int, ...], value, place)
    if not weights or min(weights) < 0 or not any(weights):
        raise place.value_error(f"is {shown(value)}; must be 0 or more each and not all 0")
    return weights


def _read_blocks(value: object, place: Place) -> Blocks:
    if not isinstance(value, dict):
        raise place.value_error(f"is {shown(value)}; expected sources and targets")
    sets: dict[str, tuple[tuple[int, ...], ...]] = {"sources": (), "targets": ()}
    for key, items in value.items():
        if key not in sets:
            raise place.error(f"unknown key {shown(key)}; {hint(str(key), sets)}")
        if not isinstance(items, list):
            raise place.key(key).value_error(f"is {shown(items)}; expected a list")
        sets[key] = tuple(read_numbers(item, place.key(key)) for item in items)
    return Blocks(sets["sources"], sets["targets"])
