"""What `tutti train` says at its end of times that do not count, and of poor predictions."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.finished_runs import PLAN, finished_run
from tutti.cli.train import doubts
from tutti.plan.files import refer_to_cluster
from tutti.plan.plan import Plan
from tutti.train.run.result import TrainResult


def emulated(plan: Plan) -> Plan:
    cluster = plan.cluster.cluster
    assert cluster is not None
    chips = [dataclasses.replace(pool.chip, emulated=True) for pool in cluster.pools]
    pools = tuple(
        dataclasses.replace(pool, node=dataclasses.replace(pool.node, chip=chip))
        for pool, chip in zip(cluster.pools, chips, strict=True)
    )
    return dataclasses.replace(
        plan, cluster=refer_to_cluster(dataclasses.replace(cluster, pools=pools))
    )


def doubts_of(folder: Path, *, predicted_s: float | None, profiles: tuple[str, ...] = ()) -> str:
    result = TrainResult(
        steps=6, losses=(4.0, 2.0), validation=(), seconds_per_step=0.5, tokens_per_s=2000.0,
        mfu=0.4, predicted_s=predicted_s, checkpoint=None, huggingface=None, output=folder,
    )  # fmt: skip
    asked = SimpleNamespace(model="m", job=SimpleNamespace(chip_profiles=profiles))
    job: Any = SimpleNamespace(plan=PLAN, config=asked)
    return "\n".join(doubts(result, job))


def test_a_poor_prediction_names_what_makes_a_better_one(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "run", plan=emulated(PLAN))
    said = doubts_of(folder, predicted_s=0.1)
    assert "--device cpu" not in doubts_of(finished_run(tmp_path / "real"), predicted_s=0.1)
    length = PLAN.job.sequence_length
    sequences = sorted({r.sequences for _, _, s in PLAN.stages() for r in s.replicas})
    tokens = ",".join(str(n * length) for n in sequences)
    assert f"--sequence-length {length} --tokens {tokens} -o here.json" in said
    assert f"tutti profile m --dtype {PLAN.job.precision.stream.value} --device cpu" in said
    assert len(sequences) > 1


@pytest.mark.parametrize(
    ("predicted_s", "profiles"), [(0.45, ()), (0.6, ()), (0.1, ("here.json",)), (None, ())]
)
def test_nothing_is_said_where_it_is_near_or_measured(
    tmp_path: Path, predicted_s: float | None, profiles: tuple[str, ...]
) -> None:
    folder = finished_run(tmp_path / "run")
    assert doubts_of(folder, predicted_s=predicted_s, profiles=profiles) == ""


def test_a_host_that_fell_behind_comes_first(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "run", plan=emulated(PLAN), overrun=0.27)
    said = doubts_of(folder, predicted_s=0.1)
    assert "fell behind the emulated chips by 27%: these times do not count" in said
    assert "profile" not in said


def test_a_run_that_had_nothing_to_do_says_nothing(tmp_path: Path) -> None:
    job: Any = None
    result = TrainResult(
        steps=6, losses=(), validation=(), seconds_per_step=0.0, tokens_per_s=0.0, mfu=0.0,
        predicted_s=0.4, checkpoint=None, huggingface=None, output=tmp_path,
    )  # fmt: skip
    assert doubts(result, job) == []
    assert doubts(dataclasses.replace(result, losses=(1.0,), predicted_s=None), job) == []
