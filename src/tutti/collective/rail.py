"""Rail-local all-to-all: first inside the island to the rank on the target's rail, then across.

No message leaves its rail, so none crosses the spine, and each rank sends one message per island
instead of one per rank. A rank of an island that lacks the target's rail forwards on one it has.
"""

from __future__ import annotations

from collections import defaultdict

from tutti.collective.columns import line_positions
from tutti.collective.draft import Draft, Request
from tutti.collective.group import Group, Island
from tutti.collective.parts import Blocks
from tutti.collective.program import Action, Pattern, Step, Team

Lane = tuple[int, int]  # a rail, and which of an island's ranks on it


def _on_rails(island: Island) -> dict[int, list[int]]:
    positions: dict[int, list[int]] = defaultdict(list)
    for position in range(island.size):
        positions[island.rail(position)].append(position)
    return dict(positions)


def _lanes(group: Group) -> list[Lane]:
    """Return every lane that some island has."""
    most: dict[int, int] = defaultdict(int)
    for island in group.kinds.values():
        for rail, positions in _on_rails(island).items():
            most[rail] = max(most[rail], len(positions))
    return [(rail, k) for rail in sorted(most) for k in range(most[rail])]


def _stops(island: Island, lanes: list[Lane]) -> list[tuple[int, bool]]:
    """Return, for each lane, the position that serves it, and whether it is the lane's own."""
    rails = _on_rails(island)
    spread = line_positions(island)
    stops = []
    for rail, k in lanes:
        on_rail = rails.get(rail)
        if on_rail is None:
            stops.append((spread[rail % island.size], False))
        else:
            stops.append((on_rail[k % len(on_rail)], k < len(on_rail)))
    return stops


def all_to_all(request: Request) -> tuple[Step, ...]:
    """Exchange in the islands by lane of the target, then across the islands in each lane."""
    group = request.group
    across = request.between(Action.ALL_TO_ALL, Pattern.DIRECT)
    lanes = _lanes(group)
    kinds = {kind: _stops(island, lanes) for kind, island in group.kinds.items()}
    stops = [kinds[island.kind] for island in group.islands]
    starts = [group.seats(i).start for i in range(len(stops))]
    ends = [
        tuple(start + stop[at][0] for start, stop in zip(starts, stops, strict=True) if stop[at][1])
        for at in range(len(lanes))
    ]
    draft = Draft()
    inner = {
        kind: Blocks(targets=_inner_targets(island, kinds[kind], ends))
        for kind, island in group.kinds.items()
    }
    teams = [Team(tuple(group.seats(i)), inner[one.kind]) for i, one in enumerate(group.islands)]
    ready = draft.add(Action.ALL_TO_ALL, Pattern.NATIVE, teams)
    sources = tuple(tuple(group.seats(i)) for i in range(len(stops)))
    outer = []
    for at in range(len(lanes)):
        members = tuple(start + stop[at][0] for start, stop in zip(starts, stops, strict=True))
        own = [stop[at][1] for stop in stops]
        targets = tuple(
            (seat,) if is_own else () for seat, is_own in zip(members, own, strict=True)
        )
        outer.append(Team(members, Blocks(sources, () if all(own) else targets)))
    draft.add(Action.ALL_TO_ALL, across, outer, ready)
    return draft.steps


def _inner_targets(
    island: Island, stops: list[tuple[int, bool]], ends: list[tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """Return, for each position, the seats whose data it forwards or keeps."""
    seats: list[list[int]] = [[] for _ in range(island.size)]
    for (position, _), targets in zip(stops, ends, strict=True):
        seats[position].extend(targets)
    return tuple(tuple(sorted(targets)) for targets in seats)
