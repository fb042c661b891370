"""A job of one rank: a plan with one chip, and links that lead nowhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from torch import Tensor

from tutti.models.spec import ModelSpec
from tutti.plan.chips import ChipSet
from tutti.plan.files import refer_to_model
from tutti.plan.job import Job, Precision
from tutti.plan.plan import ClusterReference, Pipeline, Plan, Recompute, Replica, Stage
from tutti.ranks.links import Handle, Use


class NoLinks:
    """Links of a rank that has no others; using one is a mistake of the engine."""

    def _refuse(self) -> NoReturn:
        raise RuntimeError("a job of one rank has nobody to talk to")

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        channel: str,
    ) -> Handle:
        """Refuse."""
        del sends, receives, channel
        self._refuse()

    def all_reduce(self, ranks: Sequence[int], x: Tensor, *, use: Use = "gradients") -> Handle:
        """Refuse."""
        del ranks, x, use
        self._refuse()

    def reduce_scatter(
        self, ranks: Sequence[int], x: Tensor, counts: Sequence[int], out: Tensor
    ) -> Handle:
        """Refuse."""
        del ranks, x, counts, out
        self._refuse()

    def all_gather(
        self, ranks: Sequence[int], x: Tensor, counts: Sequence[int], out: Tensor
    ) -> Handle:
        """Refuse."""
        del ranks, x, counts, out
        self._refuse()

    def group(self, ranks: Sequence[int], *, use: Use = "block") -> NoReturn:
        """Refuse."""
        del ranks, use
        self._refuse()


def plan_alone(
    spec: ModelSpec,
    *,
    sequence_length: int,
    micro_batch: int,
    micro_batches: int = 1,
    precision: Precision,
    recompute: Recompute | None = None,
    optimizer: str = "adamw",
) -> Plan:
    """Return the plan of one chip that does everything."""
    replica = Replica(
        chips=ChipSet.of("here/0/0"), sequences=micro_batch, recompute=recompute or Recompute()
    )
    stage = Stage(units=((0, spec.num_units),), replicas=(replica,))
    pipeline = Pipeline(micro_batch=micro_batch, micro_batches=micro_batches, stages=(stage,))
    return Plan(
        model=refer_to_model(spec),
        cluster=ClusterReference(name="here"),
        job=Job(
            sequence_length=sequence_length,
            global_batch=micro_batch * micro_batches,
            precision=precision,
            optimizer=optimizer,  # type: ignore[arg-type]  # checked by Plan's reader
        ),
        pipelines=(pipeline,),
    )
