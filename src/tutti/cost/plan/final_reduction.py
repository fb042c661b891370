"""The reduction that closes a step at shard levels 2 and 3, among the shards of all pipelines.

Inside a pipeline a unit's gradients are reduced already, each rank holding its shard. Pipelines
may shard differently, so a rank's shard meets those of several ranks of another pipeline. Every
piece that no cut of any pipeline divides is held by one rank of each pipeline: they reduce it
among themselves. A rank takes part in as many reductions as its shard has pieces.

Shards are laid out as fractions of the unit: replica groups in rank order, copies by their share,
the ranks of a copy evenly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from tutti.cost.memory.rank_state import Holders
from tutti.hardware.topology import Position
from tutti.models.parameters import ParameterClass
from tutti.plan.chips import ChipSet
from tutti.plan.plan import Synchronisation

Place = tuple[int, int, int]  # pipeline, stage, replica group


class Run(NamedTuple):
    """Ranks that hold equally long shards, side by side."""

    place: Place
    start: Fraction
    stop: Fraction
    chips: ChipSet
    first: int  # position of its first rank among the chips
    num_ranks: int

    @property
    def shard(self) -> Fraction:
        """What one of its ranks holds of the unit."""
        return (self.stop - self.start) / self.num_ranks


class Meeting(NamedTuple):
    """Into how many pieces a rank's shard falls, and who holds the first of them."""

    pieces: int
    chips: tuple[Position, ...]


def shard_runs(
    holders: Holders, kind: ParameterClass, rule: Synchronisation
) -> dict[int, tuple[Run, ...]]:
    """Return the layout of a unit's shards in each pipeline that holds it."""
    found: dict[int, list[tuple[Place, Fraction, ChipSet, int, int]]] = {}
    given = {(s.pipeline, s.stage, s.replica): s.weight for s in rule.shares}
    for p, s, stage in holders:
        runs = found.setdefault(p, [])
        if kind is ParameterClass.EXPERT:
            first = 0
            for group in stage.experts:
                size = group.count * group.chips
                runs.append(((p, s, 0), Fraction(group.count), stage.chips, first, size))
                first += size
            continue
        for r, replica in enumerate(stage.replicas):
            weight = given.get((p, s, r), 0) if given else replica.width
            share = Fraction(weight * replica.count)
            runs.append(((p, s, r), share, replica.chips, 0, replica.num_chips))
    return {p: tuple(_laid_out(runs)) for p, runs in found.items() if runs}


def _laid_out(runs: list[tuple[Place, Fraction, ChipSet, int, int]]) -> Iterator[Run]:
    total = sum((share for _, share, *_ in runs), Fraction(0))
    at = Fraction(0)
    for place, share, chips, first, count in runs:
        if share:
            yield Run(place, at, at + share / total, chips, first, count)
            at += share / total


def closing_meeting(layout: dict[int, tuple[Run, ...]], place: Place) -> Meeting | None:
    """Return the reductions of the rank of a replica group that has most of them; None: no shard.

    The first and the last of its ranks stand for all.
    """
    own = [run for run in layout.get(place[0], ()) if run.place == place]
    if not own and layout.get(place[0]):  # experts lie by stage, whatever the replica group
        own = [run for run in layout[place[0]] if run.place[:2] == place[:2]]
    found = [_of_rank(layout, run, rank) for run in own for rank in {0, run.num_ranks - 1}]
    return max(found, key=lambda meeting: meeting.pieces, default=None)


def _of_rank(layout: dict[int, tuple[Run, ...]], run: Run, rank: int) -> Meeting:
    low = run.start + rank * run.shard
    high = low + run.shard
    cuts: set[Fraction] = set()
    chips = [run.chips.at(run.first + rank)]
    for p, others in layout.items():
        if p == run.place[0]:
            continue
        for other in others:
            if other.stop <= low or other.start >= high:
                continue
            first = max(0, math.floor((low - other.start) / other.shard))
            last = min(other.num_ranks, math.ceil((high - other.start) / other.shard))
            cuts.update(other.start + k * other.shard for k in range(first, last + 1))
            if other.start <= low:
                chips.append(other.chips.at(other.first + first))
    inside = sum(low < cut < high for cut in cuts)
    return Meeting(1 + inside, tuple(chips))
