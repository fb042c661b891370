"""A dozen plans that name every kind of parallelism between them, written in few words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.plans import EXPERTS, SEQUENCE_LENGTH, Allocator, small_model
from tutti.models.parameters import ParameterClass
from tutti.plan.files import refer_to_cluster, refer_to_model
from tutti.plan.job import Job, ScheduleKind
from tutti.plan.plan import (
    ExpertGroup,
    Offload,
    Pipeline,
    Plan,
    Recompute,
    Replica,
    Share,
    Stage,
    Synchronisation,
)

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


ONE, FOUR = {}, ((0, 4),)
FULL = Recompute(full=((1, 3),))
OFF = Offload(activations=((1, 3),))
ZERO, GPIPE = ScheduleKind.ZERO_BUBBLE, ScheduleKind.GPIPE
INTERLEAVED, PLAIN = ScheduleKind.INTERLEAVED, ScheduleKind.ONE_F_ONE_B
MOE = {"experts_in": (1,)}

PLANS: dict[str, Plan] = {
    "unequal shares on unlike chips": Draft()
    .line((FOUR, [{"sequences": 2}, {"pool": "slow"}]))
    .plan(PLAIN, level(1, shares=(Share(pipeline=0, stage=0, replica=0, weight=3),
                                  Share(pipeline=0, stage=0, replica=1, weight=1)))),
    "three stages, unlike widths": Draft()
    .line((((0, 1),), [{"sequences": 2}, {}]), (((1, 3),), [{"tp": 2, "sequences": 3}]),
          (((3, 4),), [{"count": 3}]), micro_batches=4)
    .plan(),
    "sequence parallel into plain tensor parallel": Draft()
    .line((((0, 2),), [{"tp": 2, "sequence_parallel": True, "sequences": 2}]),
          (((2, 4),), [{"tp": 2, "sequences": 2}]))
    .plan(ZERO),
    "tensor parallel in two pieces, odd tokens": Draft(length=14)
    .line((((0, 2),), [{"tp": 2, "sequence_parallel": True, "tp_overlap_chunks": 2,
                        "recompute": Recompute(full=((1, 2),))}]),
          (((2, 4),), [{"tp": 2, "tp_overlap_chunks": 2}]))
    .plan(ZERO),
    "tensor parallel in four pieces": Draft(length=12, **MOE)
    .line((FOUR, [{"tp": 4, "sequence_parallel": True, "tp_overlap_chunks": 4, "sequences": 2,
                   "offload": OFF}]))
    .plan(),
    "context parallel, zero bubble": Draft()
    .line((((0, 2),), [{"cp": 2, "sequences": 1}]), (((2, 4),), [ONE]), micro_batches=3)
    .plan(ZERO, level(2)),
    "interleaved, tied apart": Draft(tied=True)
    .line((((0, 1), (2, 3)), [{"count": 2}]), (((1, 2), (3, 4)), [{"tp": 2, "sequences": 2}]),
          micro_batches=2)
    .plan(INTERLEAVED),
    "tied in one place, level 3": Draft(tied=True)
    .line((FOUR, [{"count": 2, "recompute": FULL}])).plan(GPIPE, level(3, bucket=2)),
    "pipelines that cut differently": Draft(tied=True)
    .line((((0, 2),), [{"tp": 2}]), (((2, 4),), [ONE]))
    .line((FOUR, [{"pool": "slow", "sequences": 1}]), micro_batches=3).plan(),
    "pipelines that shard inside": Draft()
    .line((FOUR, [{"count": 2}]))
    .line((FOUR, [{"tp": 2, "sequences": 1}]), micro_batches=1)
    .plan(PLAIN, level(2, (0, 2)), level(3, (2, 4))),
    "hybrid recomputation": Draft()
    .line((((0, 2),), [{"recompute": Recompute(full=((1, 2),)), "sequences": 2}]),
          (((2, 4),), [{"recompute": Recompute(selective=((2, 3),))},
                       {"recompute": Recompute(full=((2, 4),))}]))
    .plan(),
    "activations on the host": Draft()
    .line((FOUR, [{"offload": OFF, "count": 2}]), micro_batches=3).plan(PLAIN, level(1)),
    "experts shared out unequally": Draft(**MOE)
    .line((FOUR, [{"count": 2}]),
          experts={0: (ExpertGroup(chips=2, experts=(EXPERTS - 3, 3)),)})
    .plan(),
    "experts over tensor and data parallel": Draft(**MOE)
    .line((FOUR, [{"count": 2, "tp": 2, "sequence_parallel": True}]),
          experts={0: (ExpertGroup(chips=2, count=2),)})
    .plan(PLAIN, level(2), level(1, parameter_class=ParameterClass.EXPERT)),
    "experts beside plain tensor parallel": Draft(**MOE)
    .line((FOUR, [{"tp": 2, "sequences": 2}, {"pool": "slow"}]),
          experts={0: (ExpertGroup(chips=3, experts=(4, 1, 3)),)})
    .plan(PLAIN, level(1)),
    "experts on one tensor-parallel replica": Draft(**MOE)
    .line((FOUR, [{"tp": 2}]), experts={0: (ExpertGroup(chips=2),)}).plan(),
    "experts sliced with the rest": Draft(**MOE)
    .line((FOUR, [{"tp": 2}, {"pool": "slow"}])).plan(ZERO),
    "one key-value head for two ranks, a padding row": Draft(kv_heads=1, padding=200, tied=True)
    .line((FOUR, [{"tp": 2}])).plan(),
    "two key-value heads for four ranks, sharded": Draft(kv_heads=2, biases=True)
    .line((((0, 2),), [{"tp": 4, "tp_overlap_chunks": 2}]), (((2, 4),), [ONE]))
    .plan(ZERO, level(1)),
    "norms of heads, plain tensor parallel": Draft(head_norm="head")
    .line((FOUR, [{"tp": 2}])).plan(PLAIN, level(3)),
    "norms across few heads, one sequence parallel": Draft(kv_heads=1, head_norm="all")
    .line((((0, 2),), [{"tp": 2, "sequence_parallel": True}]), (((2, 4),), [{"tp": 2}]))
    .plan(),
    "biases of sliced experts": Draft(biases=True, **MOE)
    .line((FOUR, [{"tp": 2}])).plan(),
    "balanced experts that are recomputed": Draft(balance_loss=0.1, **MOE)
    .line((FOUR, [{"tp": 2, "recompute": FULL, "sequences": 2}]),
          experts={0: (ExpertGroup(chips=2),)}).plan(),
}  # fmt: skip
