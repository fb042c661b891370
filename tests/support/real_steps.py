"""Real steps without a training: such as a simulation says, only slower."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tutti.plan.plan import RankMap
from tutti.schedule.instruction import Op
from tutti.schedule.listing import OPS
from tutti.simulate.compare import PARTS
from tutti.simulate.measured import MeasuredRank, MeasuredStep
from tutti.simulate.result import SimulationResult


def as_measured(
    result: SimulationResult, slower: float = 1.0, by_op: Mapping[Op, float] | None = None
) -> MeasuredStep:
    """A step that went as simulated, but so many times slower; `by_op` lengthens single kinds."""
    program = result.program
    plan = program.schedule.plan
    keys = [(c.pipeline, c.stage, c.replica) for c in program.schedule.classes]
    longer = np.array([(by_op or {}).get(op, 1.0) for op in OPS])
    places, ranks = RankMap(plan), []
    for rank in range(plan.num_ranks):
        place = places.place(rank)
        index = keys.index((place.pipeline, place.stage, place.replica))
        start, end = result.timeline(index)
        lengths = (end - start) * longer[program.op[program.span(index)]]
        own = result.classes[index]
        ranks.append(
            MeasuredRank(
                rank=rank,
                rank_class=index,
                pool=place.chip.pool,
                shift_s=0.0,
                step_s=result.step_seconds * slower,
                start=start * slower,
                end=(start + lengths) * slower,
                waited=np.zeros(len(start)),
                parts={key: of(own) * slower for key, of in PARTS.values()},
            )
        )
    return MeasuredStep(step=1, ranks=tuple(ranks), clock="one clock")
