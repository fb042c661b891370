"""Plans for tests out of few words: `Draft().line((units, [replica words]), …).plan(…)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.plans import SEQUENCE_LENGTH, Allocator, small_model
from tutti.plan.files import refer_to_cluster, refer_to_model
from tutti.plan.job import Job, ScheduleKind
from tutti.plan.plan import ExpertGroup, Pipeline, Plan, Replica, Stage, Synchronisation

Units = tuple[tuple[int, int], ...]
Row = tuple[Units, Sequence[Mapping[str, Any]]]  # units of a stage, its replicas


class Draft:
    """A plan out of few words."""

    def __init__(self, layers: int = 2, *, length: int = SEQUENCE_LENGTH, **model: Any) -> None:
        self.length = length
        self.model = small_model(layers, **model)
        self.chips = Allocator()
        self.lines: list[Pipeline] = []

    def line(
        self,
        *rows: Row,
        micro_batches: int = 2,
        experts: Mapping[int, tuple[ExpertGroup, ...]] | None = None,
    ) -> Draft:
        stages = []
        for number, (units, replicas) in enumerate(rows):
            made = tuple(self._replica(dict(words)) for words in replicas)
            groups = (experts or {}).get(number, ())
            stages.append(Stage(units=units, replicas=made, experts=groups))
        micro_batch = sum(r.count * r.sequences for r in stages[0].replicas)
        self.lines.append(
            Pipeline(micro_batch=micro_batch, micro_batches=micro_batches, stages=tuple(stages))
        )
        return self

    def _replica(self, words: dict[str, Any]) -> Replica:
        pool = words.pop("pool", "fast")
        width = words.get("tp", 1) * words.get("cp", 1) * words.get("count", 1)
        return Replica(chips=self.chips.take(pool, width), **words)

    def plan(self, kind: ScheduleKind = ScheduleKind.ONE_F_ONE_B, *rules: Synchronisation) -> Plan:
        ends = {0, self.model.head_unit}
        alone = all(
            ends <= {u for span in stage.units for u in range(*span)}
            for line in self.lines
            for stage in line.stages
        )
        return Plan(
            model=refer_to_model(self.model),
            cluster=refer_to_cluster(self.chips.cluster()),
            job=Job(
                sequence_length=self.length,
                global_batch=sum(line.sequences for line in self.lines),
                schedule=kind,
            ),
            pipelines=tuple(self.lines),
            synchronisation=rules,
            tied_owner=0 if self.model.head.tied and not alone else None,
        )


def level(number: int, units: tuple[int, int] = (0, 4), **words: Any) -> Synchronisation:
    return Synchronisation(units=units, shard_level=number, **words)
