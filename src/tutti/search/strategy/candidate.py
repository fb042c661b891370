"""One strategy that may be worth a simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tutti.search.cutting.build_draft import PipelineCopies
from tutti.search.strategy.coarse_chain import Chain
from tutti.search.strategy.matching import chips_of


@dataclass(slots=True)
class Candidate:
    """Chains with their coarse price, and what simulation made of them."""

    chains: tuple[Chain, ...]
    parts: tuple[PipelineCopies, ...]
    coarse_seconds: float
    value: float = 0.0  # of the objective, by the coarse price
    hoped: float = math.inf  # the same if micro-batches could be split

    @property
    def instructions(self) -> int:
        """About how many instructions its simulation plays."""
        return sum(
            7 * part.micro_batches * sum(part.chain.stages) * part.chain.schedule.virtual
            for part in self.parts
        )

    @property
    def kind(self) -> object:
        """What candidates have in common whose prices err alike."""
        first = self.chains[0]
        return (len(self.chains), first.schedule, first.shard)

    @property
    def shape(self) -> object:
        """What candidates have in common that differ in their schedule only."""
        return tuple((c.configs, c.stages, c.copies, c.shard) for c in self.chains)

    @property
    def widths(self) -> object:
        """What candidates have in common that differ in orders and counts only."""
        return frozenset((c.width, c.ep) for chain in self.chains for c in chain.configs)

    @property
    def chips(self) -> dict[str, int]:
        """How many chips of each pool take part."""
        return chips_of(self.parts)

    @property
    def key(self) -> object:
        """What makes two candidates the same strategy."""
        return tuple(chain.key for chain in self.chains)

    def tie_break(self, places: Mapping[str, int]) -> str:
        """Return what orders candidates of one value; pools count by place, not by name."""
        return str(
            [
                (
                    [(places[c.pool], c.width, c.sequences, c.ep) for c in chain.configs],
                    chain.stages,
                    chain.copies,
                    chain.schedule,
                    chain.shard,
                )
                for chain in self.chains
            ]
        )


# Parts of every space that a question may be narrowed to: what is best there is feasible here.
NARROWER: tuple[Callable[[Sequence[Chain]], bool], ...] = (
    lambda chains: all(chain.schedule.virtual == 1 for chain in chains),
    lambda chains: all(chain.shard <= 1 for chain in chains),
    lambda chains: all(len({c.pool for c in chain.configs}) == 1 for chain in chains),
    lambda chains: all(c.width <= 2 for chain in chains for c in chain.configs),
)
