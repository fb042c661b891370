"""Hierarchical algorithms: inside the islands, across them, inside again.

Each island first brings the data to the owners of the columns with its native links; the owners of
a column work across islands, all columns at once, so that every NIC is used; then each island
spreads the result. Islands may differ in size and in NICs (see `columns`).
"""

from __future__ import annotations

from collections.abc import Callable

from tutti.collective.columns import (
    Column,
    columns,
    line,
    line_weights,
    proportional_shares,
)
from tutti.collective.draft import WHOLE, Draft, Request
from tutti.collective.notation import runs
from tutti.collective.parts import Cut, Owned, PartRule, Pieces, Reshard
from tutti.collective.program import Action, Pattern, Step, Team
from tutti.collective.slices import Part, Slice

IslandRule = Callable[[int], PartRule | Reshard]


def _island_teams(request: Request, rule: IslandRule) -> list[Team]:
    group = request.group
    return [Team(line(group, i), rule(i)) for i in range(len(group.islands))]


def _cuts(request: Request, whole: Part) -> IslandRule:
    """Return the rule that cuts `whole` along each island's line; equal islands share one."""
    islands = request.group.islands
    kinds = request.group.kinds.items()
    made = {kind: Cut(whole, line_weights(island)) for kind, island in kinds}
    return lambda index: made[islands[index].kind]


def all_reduce(request: Request) -> tuple[Step, ...]:
    """Reduce-scatter in the islands, all-reduce each column, all-gather in the islands."""
    return _all_reduce(request, Pattern.RING, ())


def proportional(request: Request) -> tuple[Step, ...]:
    """Do the same with a direct exchange in which slow islands reduce less than fast ones."""
    shares = proportional_shares([island.bandwidth for island in request.group.islands])
    return _all_reduce(request, Pattern.DIRECT, shares)


def _all_reduce(request: Request, default: Pattern, shares: tuple[int, ...]) -> tuple[Step, ...]:
    across = request.between(Action.ALL_REDUCE, default)
    inner = _island_teams(request, _cuts(request, WHOLE))
    draft = Draft()
    ready = draft.add(Action.REDUCE_SCATTER, Pattern.NATIVE, inner)
    outer = [Team(c.owners, Cut((c.of(range(1)),), shares)) for c in columns(request.group)]
    ready = draft.add(Action.ALL_REDUCE, across, outer, ready)
    draft.add(Action.ALL_GATHER, Pattern.NATIVE, inner, ready)
    return draft.steps


def reduce_scatter(request: Request) -> tuple[Step, ...]:
    """Reduce-scatter in the islands, then in each column, then hand over to the owners."""
    across = request.between(Action.REDUCE_SCATTER, Pattern.RING)
    inner, outer, handover = _sharded_teams(request, "sections")
    draft = Draft()
    ready = draft.add(Action.REDUCE_SCATTER, Pattern.NATIVE, inner)
    ready = draft.add(Action.REDUCE_SCATTER, across, outer, ready)
    draft.add(Action.ALL_TO_ALL, Pattern.NATIVE, handover, ready)
    return draft.steps


def all_gather(request: Request) -> tuple[Step, ...]:
    """Hand each island's sections to its columns, all-gather in each column, then inside."""
    across = request.between(Action.ALL_GATHER, Pattern.RING)
    inner, outer, handover = _sharded_teams(request, "cuts")
    draft = Draft()
    ready = draft.add(Action.ALL_TO_ALL, Pattern.NATIVE, handover)
    ready = draft.add(Action.ALL_GATHER, across, outer, ready)
    draft.add(Action.ALL_GATHER, Pattern.NATIVE, inner, ready)
    return draft.steps


def _sharded_teams(request: Request, toward: str) -> tuple[list[Team], list[Team], list[Team]]:
    """Return the teams inside, across, and for the hand-over between sections and columns.

    In a regular group the column of a position takes that position's sections of all islands, and
    nothing has to be handed over; otherwise each column takes its interval of every section.
    """
    group = request.group
    rails = columns(group)
    if group.is_regular:
        pieces = Pieces(tuple(tuple(map(Slice, runs(column.owners))) for column in rails))
        inner = _island_teams(request, lambda _: pieces)
        return inner, [Team(column.owners, Owned()) for column in rails], []
    seats = [group.seats(i) for i in range(len(group.islands))]
    outer = [
        Team(column.owners, Pieces(tuple((column.of(sections),) for sections in seats)))
        for column in rails
    ]
    handover = _island_teams(
        request,
        lambda i: Reshard(
            "cuts" if toward == "cuts" else "sections", line_weights(group.islands[i])
        ),
    )
    return _island_teams(request, _cuts(request, request.all_sections)), outer, handover


def broadcast(request: Request) -> tuple[Step, ...]:
    """Scatter in the root's island, broadcast each column, all-gather in every island."""
    across = request.between(Action.BROADCAST, Pattern.TREE)
    draft = Draft()
    ready = draft.add(Action.SCATTER, Pattern.NATIVE, [_root_team(request)])
    ready = draft.add(Action.BROADCAST, across, _rooted_columns(request), ready)
    inner = _island_teams(request, _cuts(request, WHOLE))
    draft.add(Action.ALL_GATHER, Pattern.NATIVE, inner, ready)
    return draft.steps


def reduce(request: Request) -> tuple[Step, ...]:
    """Reduce-scatter in the islands, reduce each column, gather in the root's island."""
    across = request.between(Action.REDUCE, Pattern.TREE)
    inner = _island_teams(request, _cuts(request, WHOLE))
    draft = Draft()
    ready = draft.add(Action.REDUCE_SCATTER, Pattern.NATIVE, inner)
    ready = draft.add(Action.REDUCE, across, _rooted_columns(request), ready)
    draft.add(Action.GATHER, Pattern.NATIVE, [_root_team(request)], ready)
    return draft.steps


def _rooted_columns(request: Request) -> list[Team]:
    def team(column: Column) -> Team:
        owners = tuple(column.owners[island] for island in request.islands)
        return Team(owners, Cut((column.of(range(1)),)))

    return [team(column) for column in columns(request.group)]


def _root_team(request: Request) -> Team:
    """Return the root's island, root first, with each member's cut of the whole."""
    island = request.islands[0]
    members = line(request.group, island)
    cut = Cut(WHOLE, line_weights(request.group.islands[island]))
    held = {seat: cut.part(members, at) for at, seat in enumerate(members)}
    order = request.island_root_first(island)
    return Team(order, Pieces(tuple(held[seat] for seat in order)))
