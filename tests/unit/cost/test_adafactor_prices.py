"""What Adafactor keeps and takes: a number for each row and column, and two messages of sums."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.any_plan import PLANS
from tutti.cost.storage.checkpoints import checkpoint_bytes
from tutti.hardware.cluster import Cluster
from tutti.hardware.local import local_cluster
from tutti.models.load import load_model
from tutti.plan.factored_means import mean_shapes, num_means
from tutti.plan.job import PRECISIONS, Job
from tutti.ranks.single_rank import plan_alone
from tutti.simulate.estimate import estimate


def test_a_matrix_has_a_mean_for_each_row_and_column() -> None:
    assert mean_shapes((7,)) == {"square": (7,)}
    assert mean_shapes((3, 5)) == {"row": (3,), "column": (5,)}
    assert mean_shapes((4, 3, 5)) == {"row": (4, 3), "column": (4, 5)}
    assert num_means((4, 3, 5)) == 4 * (3 + 5)


def test_states_of_an_8b_model_are_its_rows_and_columns() -> None:
    model = load_model("llama-3-8b")
    norms = (2 * 32 + 1) * 4096
    block = 4 * (4096 + 4096) - 2 * 3072 + 3 * (4096 + 14336)  # keys and values have 1,024 rows
    means = 32 * block + 2 * (128_256 + 4096) + norms
    jobs = {
        name: Job(
            sequence_length=4096, global_batch=1, optimizer=name, precision=PRECISIONS["pure_bf16"]
        )
        for name in ("sgd", "adafactor", "adamw")
    }
    bytes_of = {name: checkpoint_bytes(job, model) for name, job in jobs.items()}
    assert bytes_of["adafactor"] - bytes_of["sgd"] == 4 * means
    assert bytes_of["adafactor"] < bytes_of["adamw"] / 2.9

    plan = plan_alone(
        model, sequence_length=4096, micro_batch=1, micro_batches=1,
        precision=PRECISIONS["pure_bf16"], optimizer="adafactor",
    )  # fmt: skip
    here = Cluster(name="here", pools=(replace(local_cluster().pools[0], name="here"),))
    assert estimate(plan, model, here).memory[0].optimizer == pytest.approx(4 * means)


@pytest.mark.parametrize("name", ["pipelines that shard inside", "experts shared out unequally"])
def test_sums_over_ranks_are_in_the_step(name: str) -> None:
    plan = PLANS[name]
    spec, cluster = plan.model.spec, plan.cluster.cluster
    assert spec is not None
    assert cluster is not None
    steps = [
        estimate(replace(plan, job=replace(plan.job, optimizer=o)), spec, cluster).step_seconds
        for o in ("sgd", "adafactor")
    ]
    assert steps[1] > steps[0]
