"""Leader algorithms: each island speaks through one rank.

Least messages between islands, and the only way where just one rank of an island has a NIC. The
leader is the root in its own island, elsewhere the first rank with the fastest NIC.
"""

from __future__ import annotations

from tutti.collective.draft import WHOLE, Draft, Request
from tutti.collective.parts import Cut, Owned, Parts, Pieces
from tutti.collective.program import Action, Operation, Pattern, Step, Team
from tutti.collective.slices import Slice
from tutti.errors import InputError


def _leader(request: Request, island: int) -> int:
    seats = request.group.seats(island)
    if request.root is not None and request.root in seats:
        return request.root
    bandwidths = request.group.islands[island].bandwidths
    return seats[bandwidths.index(max(bandwidths))] if bandwidths else seats[0]


def _island_teams(request: Request, parts: Parts) -> list[Team]:
    teams = []
    for island in range(len(request.group.islands)):
        leader = _leader(request, island)
        others = (seat for seat in request.group.seats(island) if seat != leader)
        teams.append(Team((leader, *others), parts))
    return teams


def _leaders(request: Request, parts: Parts) -> list[Team]:
    return [Team(tuple(_leader(request, island) for island in request.islands), parts)]


def _by_island(request: Request) -> Pieces:
    seats = [request.group.seats(island) for island in request.islands]
    return Pieces(tuple((Slice(sections),) for sections in seats))


def all_reduce(request: Request) -> tuple[Step, ...]:
    """Reduce to the leaders, all-reduce among them, broadcast."""
    barrier = request.operation is Operation.BARRIER
    across = request.between(Action.ALL_REDUCE, Pattern.TREE if barrier else Pattern.RING)
    if barrier and across not in (Pattern.TREE, Pattern.BINARY):
        raise InputError(f"'across' is '{across}'; a barrier's token is not divided: tree, binary")
    inner = _island_teams(request, Cut(WHOLE))
    draft = Draft()
    ready = draft.add(Action.REDUCE, Pattern.NATIVE, inner)
    ready = draft.add(Action.ALL_REDUCE, across, _leaders(request, Cut(WHOLE)), ready)
    draft.add(Action.BROADCAST, Pattern.NATIVE, inner, ready)
    return draft.steps


def broadcast(request: Request) -> tuple[Step, ...]:
    """Broadcast among the leaders, then in the islands."""
    across = request.between(Action.BROADCAST, Pattern.TREE)
    draft = Draft()
    ready = draft.add(Action.BROADCAST, across, _leaders(request, Cut(WHOLE)))
    draft.add(Action.BROADCAST, Pattern.NATIVE, _island_teams(request, Cut(WHOLE)), ready)
    return draft.steps


def reduce(request: Request) -> tuple[Step, ...]:
    """Reduce in the islands, then among the leaders."""
    across = request.between(Action.REDUCE, Pattern.TREE)
    draft = Draft()
    ready = draft.add(Action.REDUCE, Pattern.NATIVE, _island_teams(request, Cut(WHOLE)))
    draft.add(Action.REDUCE, across, _leaders(request, Cut(WHOLE)), ready)
    return draft.steps


def reduce_scatter(request: Request) -> tuple[Step, ...]:
    """Reduce to the leaders, reduce-scatter among them, scatter in the islands."""
    across = request.between(Action.REDUCE_SCATTER, Pattern.RING)
    inner = _island_teams(request, Cut(request.all_sections))
    draft = Draft()
    ready = draft.add(Action.REDUCE, Pattern.NATIVE, inner)
    ready = draft.add(Action.REDUCE_SCATTER, across, _leaders(request, _by_island(request)), ready)
    draft.add(Action.SCATTER, Pattern.NATIVE, _island_teams(request, Owned()), ready)
    return draft.steps


def all_gather(request: Request) -> tuple[Step, ...]:
    """Gather to the leaders, all-gather among them, broadcast in the islands."""
    across = request.between(Action.ALL_GATHER, Pattern.RING)
    draft = Draft()
    ready = draft.add(Action.GATHER, Pattern.NATIVE, _island_teams(request, Owned()))
    ready = draft.add(Action.ALL_GATHER, across, _leaders(request, _by_island(request)), ready)
    inner = _island_teams(request, Cut(request.all_sections))
    draft.add(Action.BROADCAST, Pattern.NATIVE, inner, ready)
    return draft.steps


def gather(request: Request) -> tuple[Step, ...]:
    """Gather in the islands, then among the leaders."""
    across = request.between(Action.GATHER, Pattern.TREE)
    draft = Draft()
    ready = draft.add(Action.GATHER, Pattern.NATIVE, _island_teams(request, Owned()))
    draft.add(Action.GATHER, across, _leaders(request, _by_island(request)), ready)
    return draft.steps


def scatter(request: Request) -> tuple[Step, ...]:
    """Scatter among the leaders, then in the islands."""
    across = request.between(Action.SCATTER, Pattern.TREE)
    draft = Draft()
    ready = draft.add(Action.SCATTER, across, _leaders(request, _by_island(request)))
    draft.add(Action.SCATTER, Pattern.NATIVE, _island_teams(request, Owned()), ready)
    return draft.steps
