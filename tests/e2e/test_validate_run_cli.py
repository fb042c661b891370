"""`tutti validate --run`: what a run took goes back into the profile that plans the next."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.any_plan import PLANS
from tests.support.finished_runs import finished_run
from tests.support.real_steps import as_measured
from tutti.cli.main import run
from tutti.cost.plan.sources import Sources
from tutti.hardware.cluster import Cluster
from tutti.hardware.library import shipped
from tutti.hardware.pool import Pool
from tutti.hardware.profile import Profile
from tutti.models.load import load_model
from tutti.plan.job import Job
from tutti.plan.plan import Plan
from tutti.plan.uniform import Degrees, uniform_plan
from tutti.schedule.instruction import LANES, Lane, Op
from tutti.simulate.compare import compare_kinds
from tutti.simulate.estimate import estimate
from tutti.simulate.measured import write_measured

SLOWER = {
    op: {Op.FORWARD: 1.2, Op.STEP: 2.0}.get(op, 1.4)
    for op, lane in LANES.items()
    if lane is Lane.COMPUTE
}


def tutti(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        run([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err


@pytest.fixture(scope="module")
def plan() -> Plan:
    library = shipped()
    node = library.node_for(library.chips["H200"])
    cluster = Cluster(name="node", pools=(Pool(name="h200", node=node, nodes=1),))
    job = Job(sequence_length=2048, global_batch=32)
    return uniform_plan(load_model("llama-3.2-1b"), cluster, job, Degrees.parse("dp=8,mbs=2"))


@pytest.fixture
def folder(plan, tmp_path) -> Path:
    """A run whose passes took longer than the profile says."""
    made = finished_run(tmp_path / "run", plan=plan)
    result = estimate(plan, sources=Sources(profiles=(Profile.find("h200"),))).result
    write_measured(made / "trace-step-1.json", result.program, as_measured(result, by_op=SLOWER))
    return made


def test_the_scaled_profile_predicts_what_the_run_took(folder, plan, tmp_path, capsys):
    path = tmp_path / "new.json"
    words = ("validate", "--run", folder, "--chip-profile", "h200", "-o", path)
    code, out, err = tutti(*words, capsys=capsys)
    assert code == 0, err
    assert "Forward" in out
    assert "1.200" in out
    scaled = Profile.load(path)
    assert "forward 1.200, backward 1.400, optimizer 2.000" in scaled.origin
    before = estimate(plan, sources=Sources(profiles=(Profile.find("h200"),))).result
    after = estimate(plan, sources=Sources(profiles=(scaled,))).result
    measured = as_measured(before, by_op=SLOWER)
    for kind in compare_kinds(after, measured):
        if kind.op in (Op.FORWARD, Op.BACKWARD_INPUT):
            assert kind.ratio == pytest.approx(1.0, abs=0.05)


def test_a_profile_of_an_older_run_is_found_from_elsewhere(folder, tmp_path, monkeypatch, capsys):
    """It was written as seen from where the run was started: a folder above the run's."""
    Profile.find("h200").save(tmp_path / "own.json")
    (folder / "run.json").write_text(json.dumps({"job": {"chip_profiles": ["own.json"]}}))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    code, out, err = tutti("validate", "--run", folder, capsys=capsys)
    assert code == 0, err
    assert "1.200" in out


def test_the_comparison_as_json(folder, capsys):
    words = ("validate", "--run", folder, "--chip-profile", "h200", "--json")
    code, out, _ = tutti(*words, capsys=capsys)
    assert code == 0
    found = json.loads(out)
    assert found["factors"]["h200"]["forward"] == pytest.approx(1.2)
    assert {kind["op"] for kind in found["kinds"]} >= {"Forward", "BackwardInput", "Step"}


def test_what_cannot_be_compared_is_one_line(folder, tmp_path, capsys):
    for words, said in (
        (("--run", folder, "-o", tmp_path / "x.json"), "without a profile of H200"),
        (("--run", folder, "--chip-profile", "h200", "--pool", "a", "-o", tmp_path / "x.json"),
         "the run has none"),
        (("--run", folder, "--step", 9), "cannot be read"),
        (("--run", finished_run(tmp_path / "plain", plan=PLANS["hybrid recomputation"])),
         "has no trace"),
        (("--run", tmp_path / "nowhere"), "nowhere: no such folder"),
        (("--run", folder / "plan.json"), "plan.json: is a file; name a folder"),
        (("--run", folder, "--calibrate", 3), "drop the options"),
        ((), "name a CSV file"),
        (("runs.csv", "--step", 3), "go with --run"),
    ):  # fmt: skip
        code, _, err = tutti("validate", *words, capsys=capsys)
        assert code != 0
        assert said in err
        assert len(err.splitlines()) == 1
    assert not (tmp_path / "x.json").exists()


def test_of_several_traced_steps_the_median_counts(folder, plan, capsys):
    result = estimate(plan, sources=Sources(profiles=(Profile.find("h200"),))).result
    stalled = as_measured(result, slower=9.0, by_op=SLOWER)
    quick = as_measured(result, slower=0.5, by_op=SLOWER)
    write_measured(folder / "trace-step-2.json", result.program, stalled)
    write_measured(folder / "trace-step-3.json", result.program, quick)
    words = ("validate", "--run", folder, "--chip-profile", "h200", "--json")
    code, out, err = tutti(*words, capsys=capsys)
    assert code == 0, err
    assert json.loads(out)["factors"]["h200"]["forward"] == pytest.approx(1.2)
    code, out, err = tutti(*words, "--step", "2", capsys=capsys)
    assert code == 0, err
    assert json.loads(out)["factors"]["h200"]["forward"] == pytest.approx(10.8)
