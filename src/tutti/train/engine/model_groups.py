"""The groups of a rank as `nn` asks for them."""

from __future__ import annotations

from tutti.nn.parallel.groups import Group, Single
from tutti.ranks.links import Links, Use
from tutti.ranks.rank_places import Members, Seat


class EngineContext:
    """A `ParallelContext` whose groups run over the engine's links."""

    def __init__(self, seat: Seat, links: Links) -> None:
        self.tensor = _group(seat.tensor, links)
        self.context = _group(seat.context, links)
        self.experts = _group(seat.experts, links)
        self.boundary = _group(seat.tensor, links, "boundary")  # joins what arrives in slices
        self.sequence_parallel = seat.sequence_parallel
        self.overlap_chunks = seat.replica.tp_overlap_chunks
        self.expert_counts = seat.expert_counts


def _group(members: Members, links: Links, use: Use = "block") -> Group:
    return Single() if members.size == 1 else links.group(members.ranks, use=use)
