"""Trains a plan with ranks as threads and keeps every step's tensors, as `tutti align` does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.launching import plan_of
from tests.support.threads import World
from tests.support.training import batches_of, engine_of, sample, settings
from tutti.document import Place
from tutti.hardware.cluster import Cluster
from tutti.models.spec import ModelSpec
from tutti.plan.chips import ChipSet
from tutti.plan.plan import Plan, Replica
from tutti.train.engine.engine import Engine
from tutti.train.run.step_dump import write_step_dump
from tutti.train.run.step_tensors import StepTensors

Plant = Callable[[Engine], None]  # a fault, in an engine that is about to train


def two_cpus() -> Cluster:
    return Cluster.from_document(
        {"name": "pair", "pools": [{"name": "cpu", "node": "CPU-host"}]}, Place("pair")
    )


def in_two_stages(model: ModelSpec | None = None, **others: Any) -> Plan:
    stages = [[Replica(chips=ChipSet.of(f"cpu/0/{slot}"), sequences=3)] for slot in range(2)]
    return plan_of(two_cpus(), stages, model, **others)


def in_unequal_shares(model: ModelSpec | None = None, **others: Any) -> Plan:
    """One stage; one chip takes two of three sequences."""
    replicas = [Replica(chips=ChipSet.of(f"cpu/0/{slot}"), sequences=2 - slot) for slot in range(2)]
    return plan_of(two_cpus(), [replicas], model, **others)


def dump_steps(
    plan: Plan,
    target: Path,
    *,
    steps: int = 2,
    plant: Plant | None = None,
    learning_rate: float = 3e-4,
) -> Path:
    """Train and write the dump; the ranks' pieces lie beside it."""
    spec = plan.model.spec
    assert spec is not None
    pieces = target.with_name(f"{target.name}-pieces")
    job = plan.job

    def one(links: Any) -> None:
        engine = engine_of(plan, spec, links)
        if plant is not None:
            plant(engine)
        kept = StepTensors(engine, pieces)
        for step in range(steps):
            engine.step(batches_of(engine, step), settings(learning_rate))
            kept.after_step()
        kept.close()
        if links.rank == 0:
            rows = [
                sample(spec, step, index, job.sequence_length)[0].numpy()
                for step in range(steps)
                for index in range(job.global_batch)
            ]
            kept.write_facts(np.stack(rows), seed=0, cluster="pair")

    World(plan.num_ranks).run(one)
    write_step_dump(pieces, target, side=target.name)
    return target
