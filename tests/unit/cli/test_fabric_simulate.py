"""`tutti fabric simulate` on plans that do not go together."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tutti.cli.main import app
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.plan.files import save_plan
from tutti.plan.job import Job
from tutti.plan.uniform import Degrees, uniform_plan


def test_plans_of_two_clusters_are_refused_in_a_line(tmp_path: Path) -> None:
    paths = []
    for name in ("oversubscribed", "emulated-4-2-1"):
        job = Job(sequence_length=64, global_batch=1920)
        plan = uniform_plan(
            load_model("smollm2-135m"), Cluster.load(name), job, Degrees.parse("tp=1,pp=1")
        )
        paths.append(tmp_path / f"{name}.json")
        save_plan(plan, paths[-1])
    with pytest.raises(InputError, match="cluster") as raised:
        CliRunner().invoke(app, ["fabric", "simulate", *map(str, paths)], catch_exceptions=False)
    assert "\n" not in str(raised.value)
