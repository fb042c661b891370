"""`tutti plan` with its search, as a user types it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest

from tests.e2e.test_plan_cli import tutti
from tests.support.tiny import write_cluster, write_model
from tests.unit.cost.layer_folder import write_folder
from tutti.cli.main import run
from tutti.cli.shared.progress import ProgressLine
from tutti.plan.check import check_plan
from tutti.plan.files import load_plan, plan_from_document
from tutti.plan.job import ScheduleKind
from tutti.search.question.effort import Progress

NARROW = ("--tp-max", "1", "--max-stages", "2", "--schedule", "1f1b", "--micro-batch", "1,2")
KEYS = {
    "plan", "step_time_s", "lower_bound_s", "gap_pct", "mfu", "mixed_efficiency_pct", "uniform",
    "alone", "search_cpu_s",
}  # fmt: skip


@pytest.fixture(scope="module")
def question(tmp_path_factory):
    folder = tmp_path_factory.mktemp("question")
    model, cluster = write_model(folder / "tiny"), write_cluster(folder / "pair.yaml")
    return ("plan", str(model), str(cluster), "--sequence-length", "512", "--global-batch", "16")


@pytest.fixture(scope="module")
def planned(question, tmp_path_factory):
    path = tmp_path_factory.mktemp("planned") / "plan.json"
    with pytest.raises(SystemExit) as stopped:
        run((*question, *NARROW, "-o", str(path)))
    assert not stopped.value.code
    return path


# --- answers ---------------------------------------------------------------------------------


def test_a_search_explains_itself_and_writes_the_plan(question, capsys, tmp_path):
    path = tmp_path / "plan.json"
    code, out, err = tutti(capsys, *question, *NARROW, "-o", str(path))
    assert code == 0
    assert err == ""
    for said in ("tiny on pair", "per step", "this plan", "best uniform", "lower bound",
                 "new alone", "old alone", f"written to {path}"):  # fmt: skip
        assert said in out
    plan = load_plan(path)
    assert check_plan(plan) == []
    assert plan.job.global_batch == 16


def test_json_has_the_promised_keys(question, capsys):
    code, out, _ = tutti(capsys, *question, *NARROW, "--json")
    found = json.loads(out)
    assert code == 0
    assert set(found) >= KEYS
    assert found["lower_bound_s"] <= found["step_time_s"] <= found["uniform"]["step_time_s"]
    assert set(found["alone"]) == {"new", "old"}
    assert check_plan(plan_from_document(found["plan"], "plan")) == []


def test_limits_are_obeyed(question, capsys):
    code, out, err = tutti(
        capsys, *question, "--tp-max", "1", "--max-stages", "2", "--schedule", "zero_bubble",
        "--schedule", "1f1b", "--shard", "0", "--no-offload", "--no-recompute", "--cp-max", "1",
        "--no-mixed-stages", "--no-mixed-pipelines", "--json",
    )  # fmt: skip
    assert code == 0, err
    plan = plan_from_document(json.loads(out)["plan"], "plan")
    assert plan.job.schedule in (ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZERO_BUBBLE)
    assert all(rule.shard_level == 0 for rule in plan.synchronisation)
    assert all(len(pipeline.stages) <= 2 for pipeline in plan.pipelines)
    for _, _, stage in plan.stages():
        assert len(stage.chips.pools) == 1
        for replica in stage.replicas:
            assert (replica.tp, replica.cp) == (1, 1)
            assert replica.recompute == type(replica.recompute)()
            assert replica.offload == type(replica.offload)()


def test_one_pool_only(question, capsys):
    code, out, err = tutti(capsys, *question, *NARROW, "--pool-only", "old", "--json")
    assert code == 0, err
    plan = plan_from_document(json.loads(out)["plan"], "plan")
    assert {pool for _, _, stage in plan.stages() for pool in stage.chips.pools} == {"old"}


def test_a_page(question, capsys, tmp_path):
    page = tmp_path / "plan.html"
    code, out, err = tutti(capsys, *question, *NARROW, "--html", str(page))
    assert code == 0, err
    assert f"written to {page}" in out
    assert "tiny on pair" in page.read_text()


def test_measured_layers(capsys, tmp_path):
    folder = write_folder(tmp_path / "layers")
    arguments = ["plan", "opt-350m", "OPT-8", "--sequence-length", "2048", "--global-batch", "64",
                 "--max-stages", "2", "--schedule", "1f1b", "--shard", "0", "--no-recompute",
                 "--no-offload", "--profile", str(folder), "--json"]  # fmt: skip
    code, out, err = tutti(capsys, *arguments)
    assert code == 0, err
    assert json.loads(out)["basis"]["a100"].startswith("layer profile layers")


# --- export ----------------------------------------------------------------------------------


def test_megatron_arguments_are_printed_or_written(question, capsys, tmp_path):
    arguments = [*question, *NARROW, "--pool-only", "new", "--shard", "0", "--export", "megatron"]
    code, out, err = tutti(capsys, *arguments)
    assert code == 0, err
    assert "--global-batch-size 16" in out
    assert "per step" not in out
    target = tmp_path / "arguments.txt"
    code, printed, _ = tutti(capsys, *arguments, "--export-to", str(target))
    assert code == 0
    assert target.read_text() == out
    assert "per step" in printed


def test_a_search_can_be_kept_to_what_a_system_can_run(question, capsys):
    arguments = [*question, "--pool-only", "new", "--shard", "2"]
    code, _, err = tutti(capsys, *arguments, "--export", "flagscale")
    assert code == 2
    assert "; plan with --exportable flagscale to search only what it can run" in err
    arguments = [*question, "--pool-only", "new", "--exportable", "flagscale"]
    code, out, err = tutti(capsys, *arguments, "--export", "flagscale")
    assert code == 0, err
    assert "enable_hetero: true" in out


def test_a_uniform_plan_can_be_exported(capsys):
    arguments = ["plan", "llama-2-7b", "E100", "--uniform", "tp=8,pp=4", "--export", "flagscale"]
    code, out, err = tutti(capsys, *arguments)
    assert code == 0, err
    assert "hetero" in out


def test_what_megatron_cannot_say_is_one_line(capsys):
    arguments = ["plan", "llama-2-7b", "E100", "--uniform", "tp=8,pp=4", "--export", "megatron"]
    code, out, err = tutti(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "Megatron-LM" in err


# --- changed clusters ------------------------------------------------------------------------


@pytest.mark.slow  # several changes at once; test_a_lost_node asks one
def test_capacity_questions(question, capsys):
    changes = ["--what-if", "+2 nodes new", "--what-if", "-pool old"]
    code, out, err = tutti(capsys, *question, *NARROW, *changes)
    assert code == 0, err
    for said in ("what if", "as it is", "+2 nodes new", "-pool old"):
        assert said in out
    code, out, _ = tutti(capsys, *question, *NARROW, *changes, "--json")
    rows = json.loads(out)["what_if"]
    assert [row["chips"] for row in rows] == [6, 10, 4]
    assert rows[0]["difference_pct"] == 0
    assert all(row["lower_bound_s"] <= row["step_time_s"] for row in rows)


def test_a_lost_node(question, planned, capsys, tmp_path):
    target = tmp_path / "new.json"
    lost = ["--replan-from", str(planned), "--what-if", "-node new/0"]
    code, out, err = tutti(capsys, *question, *NARROW, *lost, "-o", str(target))
    assert code == 0, err
    for said in ("re-planning", "state that moves", "time to move", "paid back after"):
        assert said in out
    assert "new/1 → new/0 (old → new number)" in out
    assert load_plan(target).cluster.cluster.pool("new").nodes == 1
    code, out, _ = tutti(capsys, *question, *NARROW, *lost, "--json")
    found = json.loads(out)["replan"]
    assert found["moved_bytes"] >= 0
    assert {"kept_old", "payback_s", "movement_s", "words"} <= set(found)
    assert found["renumbered"] == {"new/1": "new/0"}


def test_the_running_job_is_the_default(question, planned, capsys):
    """Batch and sequence length come from the old plan; the changed cluster may be a file."""
    code, out, err = tutti(capsys, *question[:3], *NARROW, "--replan-from", str(planned), "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["plan"]["job"]["global_batch"] == 16
    assert found["replan"]["kept_old"] is True
    assert found["replan"]["moved_bytes"] == 0


# --- clumsy users ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--tp-max", "0"], "--tp-max: 0 is too small"),
        (["--cp-max", "-1"], "--cp-max: -1 is too small"),
        (["--max-stages", "0"], "--max-stages: 0 is too small"),
        (["--micro-batch", "two"], "--micro-batch: 'two' is no number"),
        (["--micro-batch", "64"], "64 sequences are more than the global batch of 16"),
        (["--shard", "1,7"], "--shard: no level 7"),
        (["--schedule", "1f1b,zero_bubbel"], "did you mean 'zero_bubble'?"),
        (["--pool-only", "odl"], "did you mean 'old'?"),
        (["--objective", "money"], "--objective: 'money'"),
        (["--objective", "cost"], "pool 'old' has no 'price_per_chip_hour'"),
        (["--precision", "bf17"], "did you mean 'bf16'?"),
        (["--global-batch", "0"], "at least 1"),
        (["--sequence-length", "-5"], "at least 1"),
        (["--export", "megatorn"], "did you mean 'megatron'?"),
        (["--export-to", "x.txt"], "--export-to: goes with --export"),
        (["--export", "megatron", "--json"], "give --export-to FILE"),
        (["--extrapolate"], "--extrapolate goes with --profile"),
        (["--profile", "/nowhere"], "no such folder"),
        (["--calibrations", "/nowhere"], "/nowhere"),
        (["--what-if", "+8xH101"], "H101"),
        (["--what-if", "more"], "is no change"),
        (["--replan-from", "/nowhere/plan.json"], "no such file"),
        (["--html", "/nowhere/x.html"], "there is no folder /nowhere"),
        (["-o", "/nowhere/x.json"], "there is no folder /nowhere"),
        (["--uniform", "tp=2", "--tp-max", "1"], "--tp-max: goes with a search"),
        (["--uniform", "tp=2", "--no-offload"], "--no-offload: goes with a search"),
        (["--uniform", "tp=2", "--pool-only", "new"], "--pool-only: goes with a search"),
        (["--uniform", "tp=2", "--use-all-pools"], "--use-all-pools: goes with a search"),
        (["--uniform", "tp=2", "--what-if", "-node 0"], "--what-if: goes with a search"),
        (["--uniform", "tp=2", "--objective", "energy"], "--objective: goes with a search"),
        (["--uniform", "tp=2", "--schedule", "1f1b,gpipe"], "a uniform plan has one"),
    ],
)
def test_clumsy_options_get_one_line(question, extra, said, capsys):
    code, out, err = tutti(capsys, *question, *extra)
    assert code == 2
    assert out == ""
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_results_do_not_overwrite_what_was_read(question, planned, capsys):
    for target in (question[2], str(planned)):
        code, _, err = tutti(capsys, *question, "--replan-from", str(planned), "-o", target)
        assert code == 2
        assert "is read or written already" in err


def test_clumsy_replanning_gets_one_line(question, planned, capsys, tmp_path):
    for arguments, said in (
        ([*question, "--what-if", "-node 0", "--what-if", "-node 1"], "give one --what-if"),
        ([*question[:3], "--global-batch", "32"], "global_batch 16, this 32"),
        (["plan", "gpt2", question[2]], "give the same model"),
        (["plan", question[1], "laptop", "--what-if", "-node 0"], "not this 'laptop'"),
    ):
        code, _, err = tutti(capsys, *arguments, *NARROW, "--replan-from", str(planned))
        assert code == 2
        assert said in err
        assert len(err.strip().splitlines()) == 1


def test_a_model_that_fits_nowhere_is_an_answer(capsys, tmp_path):
    cluster = write_cluster(tmp_path / "pair.yaml")
    code, _, err = tutti(capsys, "plan", "llama-3.1-405b", str(cluster), "--max-stages", "2")
    assert code == 2
    assert len(err.strip().splitlines()) == 1


# --- terminals -------------------------------------------------------------------------------


def on_a_terminal(*arguments: str) -> tuple[subprocess.Popen[bytes], int]:
    """Start tutti with standard error on a pseudo-terminal."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "tutti.cli.main", *arguments],
        stdout=subprocess.PIPE, stderr=slave, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(slave)
    return process, master


def read_all(master: int) -> str:
    parts = []
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(master)
    return b"".join(parts).decode(errors="replace")


def test_a_terminal_sees_a_progress_line(question):
    process, master = on_a_terminal(*question, *NARROW)
    shown = read_all(master)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "planning" in shown
    assert "planning" not in out.decode()


def test_an_interrupt_returns_the_best_plan_so_far(question, capsys, tmp_path, monkeypatch):
    """Ctrl-C as soon as there is a plan: it is explained, written, and said to be unfinished."""

    def interrupt(self: ProgressLine, progress: Progress) -> None:
        if progress.best_seconds is not None:
            raise KeyboardInterrupt

    monkeypatch.setattr(ProgressLine, "__call__", interrupt)
    target = tmp_path / "plan.json"
    code, out, err = tutti(capsys, *question, *NARROW, "-o", str(target))
    assert code == 130, err
    assert "interrupted" in out
    assert check_plan(load_plan(target)) == []
