"""Which rank of one engine sends which heads of which unit to which rank of another. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tutti.models import ModelSpec
from tutti.plan.plan import Pipeline

Span = tuple[int, int]  # half-open


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """The stages of one engine: units and tensor-parallel ranks of each."""

    stages: tuple[tuple[Span, int], ...]
    page_size: int

    @classmethod
    def of(cls, pipeline: Pipeline) -> EngineLayout:
        """Return the layout of one engine of a pipeline."""
        assert pipeline.engine is not None
        stages = tuple((stage.units[0], stage.replicas[0].tp) for stage in pipeline.stages)
        return cls(stages, pipeline.engine.page_size)

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages."""
        return sum(tp for _, tp in self.stages)

    def holders(self, unit: int) -> range:
        """Return the ranks that hold a unit, by tensor position."""
        first = 0
        for units, tp in self.stages:
            if units[0] <= unit < units[1]:
                return range(first, first + tp)
            first += tp
        raise ValueError(f"no stage has unit {unit}")


class Part(NamedTuple):
    """Heads of a unit that one rank sends to another, by both ranks' own counts."""

    unit: int
    source: int  # rank
    target: int
    given: Span  # heads as the source counts them
    taken: Span  # as the target does


def heads_of(kv_heads: int, tp: int, rank: int) -> Span:
    """Return the heads of keys and values that a tensor-parallel rank holds."""
    if tp <= kv_heads:
        each = kv_heads // tp
        return rank * each, (rank + 1) * each
    own = rank * kv_heads // tp  # several ranks hold the same head
    return own, own + 1


def parts_between(spec: ModelSpec, source: EngineLayout, target: EngineLayout) -> list[Part]:
    """Return all that one engine sends to another; every head that is needed comes once."""
    parts = []
    for unit in range(1, spec.num_layers + 1):
        attention = spec.block(unit).attention
        senders, takers = source.holders(unit), target.holders(unit)
        if attention.latent is not None:  # every rank has all of it
            parts += [
                Part(unit, senders[t % len(senders)], rank, (0, 1), (0, 1))
                for t, rank in enumerate(takers)
            ]
            continue
        count = attention.kv_heads
        held: dict[int, tuple[int, int]] = {}  # head: its first holder, and its place there
        for t, rank in enumerate(senders):
            low, high = heads_of(count, len(senders), t)
            for head in range(low, high):
                held.setdefault(head, (rank, head - low))
        for t, rank in enumerate(takers):
            low, high = heads_of(count, len(takers), t)
            parts += _runs(unit, rank, [held[head] for head in range(low, high)])
    return parts


def _runs(unit: int, target: int, wanted: list[tuple[int, int]]) -> list[Part]:
    """Return heads that follow each other on one rank as one part."""
    parts: list[Part] = []
    for place, (rank, head) in enumerate(wanted):
        last = parts[-1] if parts else None
        if last is not None and last.source == rank and last.given[1] == head:
            parts[-1] = last._replace(
                given=(last.given[0], head + 1), taken=(last.taken[0], place + 1)
            )
        else:
            parts.append(Part(unit, rank, target, (head, head + 1), (place, place + 1)))
    return parts
