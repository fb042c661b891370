"""How busy the stages of a simulated plan are: which of them should hand units on."""

from __future__ import annotations

from dataclasses import dataclass

from tutti.plan.plan import Plan
from tutti.search.thresholds import THRESHOLDS
from tutti.simulate.estimate import Estimate


@dataclass(frozen=True, slots=True)
class Loads:
    """Seconds that the chips of each stage compute, by pipeline and stage."""

    seconds: dict[tuple[int, int], float]

    @classmethod
    def of(cls, estimate: Estimate) -> Loads:
        """Read the loads off a simulation."""
        seconds: dict[tuple[int, int], float] = {}
        for rank_class, result in zip(
            estimate.schedule.classes, estimate.result.classes, strict=True
        ):
            place = (rank_class.pipeline, rank_class.stage)
            busy = sum(result.compute.values())
            seconds[place] = max(seconds.get(place, 0.0), busy)
        return cls(seconds)

    def promise(self, p: int, giving: int, taking: int) -> float:
        """Return less the more a move from a stage to another evens the loads."""
        return self.seconds[p, taking] - self.seconds[p, giving]

    def may_pay(self, p: int, giving: int, taking: int, plan: Plan) -> bool:
        """Tell whether a unit more leaves a stage no busier than the busiest one, or nearly."""
        if giving == taking:
            return True
        stage = plan.pipelines[p].stages[taking]
        each = self.seconds[p, taking] / max(1, stage.num_units)
        most = max(s for (pipeline, _), s in self.seconds.items() if pipeline == p)
        return self.seconds[p, taking] + 0.5 * each <= THRESHOLDS.nearly_busiest * most
