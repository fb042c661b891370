"""Group: who takes part in a collective, and how they hang together.

A group is a list of islands; the ranks of an island share native links (NVLink, XPU Link, HCCS,
one host's memory). Islands may differ in size. Each rank has a rail (the NIC it leaves its island
by) and a relative NIC bandwidth. The order in which islands and their ranks are listed is the
order on the wire: neighbours in it are neighbours in a ring.

A *seat* is an index into that order. Programs speak of seats only; `Group.ranks` turns a seat into
a rank. Buffers that callers see are laid out by ascending rank, as torch.distributed does.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

from tutti.collective.notation import fold, read_numbers, unfold
from tutti.document import Count, Place, build_fields
from tutti.errors import InputError, hint

IslandKind = tuple[int, tuple[int, ...], tuple[float, ...]]  # size, rails, bandwidths


class Edge(enum.StrEnum):
    """What joins two ranks: the island's native links, one rail, or the fabric between rails."""

    ISLAND = "island"
    RAIL = "rail"
    CROSS = "cross"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Island:
    """Ranks that share native links, in the order of their positions."""

    ranks: tuple[int, ...]
    rails: tuple[int, ...] = ()  # the NIC of each rank; none given: its position
    bandwidths: tuple[float, ...] = ()  # relative NIC bandwidth of each rank; none given: equal

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ValueError("an island needs at least one rank")
        if min(self.ranks) < 0 or min(self.rails, default=0) < 0:
            raise ValueError("ranks and rails are counted from 0")
        for name, given in (("rails", self.rails), ("bandwidths", self.bandwidths)):
            if given and len(given) != len(self.ranks):
                raise ValueError(f"'{name}' has {len(given)} entries for {len(self.ranks)} ranks")
        if not all(math.isfinite(b) and b >= 0 for b in self.bandwidths):
            raise ValueError(f"'bandwidths' is {list(self.bandwidths)}; must be finite, 0 or more")
        if self.bandwidths and not any(self.bandwidths):
            raise ValueError("'bandwidths' are all 0; an island needs one NIC that works")

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    def rail(self, position: int) -> int:
        """Return the rail of the rank at `position`."""
        return self.rails[position] if self.rails else position

    @property
    def bandwidth(self) -> Fraction:
        """Return the sum of the relative NIC bandwidths."""
        return sum((Fraction(b) for b in self.bandwidths), Fraction(0)) or Fraction(self.size)

    @property
    def kind(self) -> IslandKind:
        """Return what islands of equal structure have in common: all but their ranks."""
        return (self.size, self.rails, self.bandwidths)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _WrittenIsland:
    """An island, or several that differ only by a shift of their ranks, as a file holds it."""

    ranks: object
    rails: object = None
    bandwidths: tuple[float, ...] = ()
    times: Count = 1
    shift: int = 0

    def islands(self, place: Place) -> list[Island]:
        ranks = read_numbers(self.ranks, place.key("ranks"))
        rails = () if self.rails is None else read_numbers(self.rails, place.key("rails"))
        try:
            return [
                Island(ranks=shifted, rails=rails, bandwidths=self.bandwidths)
                for shifted in unfold(ranks, self.times, self.shift, place)
            ]
        except ValueError as error:
            raise place.error(str(error)) from None


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """The ranks of a collective, island by island."""

    islands: tuple[Island, ...]
    ranks: tuple[int, ...] = dataclasses.field(init=False, repr=False, compare=False)
    _island_of: tuple[int, ...] = dataclasses.field(init=False, repr=False, compare=False)
    _starts: tuple[int, ...] = dataclasses.field(init=False, repr=False, compare=False)
    _seat_of: dict[int, int] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.islands:
            raise ValueError("a group needs at least one island")
        ranks = tuple(rank for island in self.islands for rank in island.ranks)
        seats = {rank: seat for seat, rank in enumerate(ranks)}
        if len(seats) != len(ranks):
            twice = next(rank for seat, rank in enumerate(ranks) if seats[rank] != seat)
            raise ValueError(f"rank {twice} stands in the group twice")
        starts = [0]
        for island in self.islands:
            starts.append(starts[-1] + island.size)
        owners = tuple(i for i, island in enumerate(self.islands) for _ in range(island.size))
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "_starts", tuple(starts))
        object.__setattr__(self, "_island_of", owners)
        object.__setattr__(self, "_seat_of", seats)

    @classmethod
    def of(cls, islands: Iterable[Sequence[int]]) -> Group:
        """Return the group of islands given as lists of ranks."""
        return cls(tuple(Island(ranks=tuple(ranks)) for ranks in islands))

    @classmethod
    def regular(cls, num_islands: int, size: int) -> Group:
        """Return `num_islands` islands of `size` consecutive ranks each."""
        return cls.of(range(i * size, (i + 1) * size) for i in range(num_islands))

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    @property
    def kinds(self) -> dict[IslandKind, Island]:
        """Return one island of each structure."""
        return {island.kind: island for island in self.islands}

    @property
    def is_regular(self) -> bool:
        """Tell whether all islands have one structure and equal NICs."""
        return len(self.kinds) == 1 and len(set(self.islands[0].bandwidths)) < 2

    def seat(self, rank: int) -> int:
        """Return the seat of a rank."""
        try:
            return self._seat_of[rank]
        except KeyError:
            known = hint(str(rank), map(str, self._seat_of))
            raise InputError(f"rank {rank} is not in the group; {known}") from None

    def island_of(self, seat: int) -> int:
        """Return the index of the island in which a seat is."""
        return self._island_of[seat]

    def position_of(self, seat: int) -> int:
        """Return the position of a seat in its island."""
        return seat - self._starts[self._island_of[seat]]

    def rail_of(self, seat: int) -> int:
        """Return the rail of a seat."""
        return self.islands[self._island_of[seat]].rail(self.position_of(seat))

    def seats(self, island: int) -> range:
        """Return the seats of an island."""
        return range(self._starts[island], self._starts[island + 1])

    def edge(self, one: int, other: int) -> Edge:
        """Return what joins two seats."""
        if self._island_of[one] == self._island_of[other]:
            return Edge.ISLAND
        return Edge.RAIL if self.rail_of(one) == self.rail_of(other) else Edge.CROSS

    @property
    def by_rank(self) -> Sequence[int]:
        """Return the seats by ascending rank: the order of callers' buffers."""
        if all(a < b for a, b in zip(self.ranks, self.ranks[1:], strict=False)):
            return range(self.size)
        return tuple(self._seat_of[rank] for rank in sorted(self.ranks))

    @classmethod
    def from_document(cls, value: object, place: Place) -> Group:
        """Build a group from a list of islands."""
        if not isinstance(value, list):
            raise place.value_error("must be a list of islands")
        islands: list[Island] = []
        for index, item in enumerate(value):
            inner = place.item(index, item)
            islands.extend(build_fields(_WrittenIsland, item, inner).islands(inner))
        try:
            return cls(tuple(islands))
        except ValueError as error:
            raise place.error(str(error)) from None

    def to_document(self) -> list[dict[str, Any]]:
        """Return the islands, equal ones folded."""
        written = []
        for repeat, (_, rails, bandwidths) in fold([(i.ranks, i.kind) for i in self.islands]):
            island: dict[str, Any] = {"ranks": repeat.pop("members")}
            if rails:
                island["rails"] = list(rails)
            if bandwidths:
                island["bandwidths"] = list(bandwidths)
            written.append(island | repeat)
        return written
