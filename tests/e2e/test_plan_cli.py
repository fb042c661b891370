"""`tutti plan` and `tutti show` as a user types them, clumsy first attempts included."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tutti.cli.main import run


def tutti(capsys, *arguments: str) -> tuple[int, str, str]:
    try:
        run(arguments)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    else:
        code = 0
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def plan(tmp_path, capsys):
    path = tmp_path / "plan.json"
    code, _, err = tutti(
        capsys, "plan", "llama-2-70b", "E100", "--uniform", "tp=8,pp=4,sp=1,shard=1",
        "--global-batch", "256", "-o", str(path),
    )  # fmt: skip
    assert code == 0, err
    return path


def test_a_length_beyond_what_a_model_was_made_for(capsys):
    arguments = ["plan", "llama-2-7b", "E100", "--uniform", "tp=8,pp=4", "--sequence-length"]
    code, _, err = tutti(capsys, *arguments, "8192")
    assert code == 0
    assert err.startswith("note: a sequence of 8,192 tokens is longer than the 4,096 that")
    assert tutti(capsys, *arguments, "4096")[2] == ""
    for given in ([], ["--uniform", "tp=1,pp=1"]):
        code, _, err = tutti(capsys, "plan", "gpt2", "E100", "--sequence-length", "2048", *given)
        assert code == 2
        assert "2,048 tokens is longer than the 1,024 learned positions of 'gpt2'" in err
        assert len(err.splitlines()) == 1


def test_a_plan_shows_and_explains_its_collective_programs(plan, capsys):
    written = json.loads(plan.read_text())["collectives"]
    assert {entry["use"] for entry in written} == {"gradients", "parameters"}
    code, out, err = tutti(capsys, "show", str(plan))
    assert code == 0, err
    assert "collective programs" in out
    assert all(entry["algorithm"] in out for entry in written)
    code, out, err = tutti(capsys, "comm", "explain", str(plan))
    assert code == 0, err
    assert "gradients: reduce_scatter" in out
    code, out, err = tutti(capsys, "comm", "explain", str(plan), "--json", "--op", "all_gather")
    assert code == 0, err
    rows = json.loads(out)["collectives"]
    assert {row["operation"] for row in rows} == {"all_gather"}
    for row in rows:
        assert row["recorded"]
        assert row["alternatives"]
        assert all(other["seconds"] >= row["seconds"] for other in row["alternatives"])


def test_what_goes_with_a_cluster_does_not_go_with_a_plan(plan, capsys):
    for arguments, words in (
        ([str(plan), "--bytes", "1M"], "--bytes, --nodes, --profile: go with a cluster"),
        (["S16", "--trace", str(plan)], "--trace: goes with a plan"),
    ):
        code, _, err = tutti(capsys, "comm", "explain", *arguments)
        assert code == 2
        assert words in err
        assert len(err.splitlines()) == 1


def test_an_existing_plan_is_exported(plan, capsys, tmp_path):
    code, out, err = tutti(capsys, "show", str(plan), "--export", "flagscale")
    assert code == 0, err
    assert "hetero_process_meshes" in out
    assert "no deadlock" not in out
    target = tmp_path / "mesh.yaml"
    code, said, _ = tutti(
        capsys, "show", str(plan), "--export", "flagscale", "--export-to", str(target)
    )
    assert (code, target.read_text()) == (0, out)
    assert f"written to {target}" in said
    code, _, err = tutti(capsys, "show", str(plan), "--export", "megatron")
    assert code == 2
    assert "Megatron-LM: chips: " in err
    code, _, err = tutti(capsys, "show", str(plan), "--export", "megatorn")
    assert (code, "did you mean 'megatron'?" in err) == (2, True)


def test_a_uniform_plan_is_drawn_written_and_shown(plan, capsys):
    code, out, _ = tutti(capsys, "show", str(plan))
    assert code == 0
    assert "embedding, 1-20" in out
    assert "61-80, head" in out
    assert "a800/0-3/0-7" in out
    assert "no deadlock" in out


def test_json(plan, capsys):
    code, out, _ = tutti(capsys, "show", str(plan), "--json", "--schedule")
    found = json.loads(out)
    assert code == 0
    assert found["problems"] == []
    assert found["plan"]["format"] == "tutti-plan/1"
    assert [c["num_ranks"] for c in found["schedule"]] == [32, 32, 32, 32]
    ops = {entry["op"] for c in found["schedule"] for entry in c["instructions"]}
    assert {"Forward", "BackwardInput", "BackwardWeight", "Send", "Receive", "Step"} <= ops


def test_broken_plans_exit_with_2_and_one_line_per_problem(plan, capsys):
    document = json.loads(plan.read_text())
    document["pipelines"][0]["stages"][0]["units"] = [[0, 20]]
    document["pipelines"][0]["stages"][1]["replicas"][0]["chips"] = "a801/0-3/0-7"
    plan.write_text(json.dumps(document))
    code, _, err = tutti(capsys, "show", str(plan))
    lines = err.strip().splitlines()
    assert code == 2
    assert "tutti: plan.json: pipeline 0: no stage holds units 20-20" in lines
    assert any("no pool 'a801'; did you mean 'a800'?" in line for line in lines)
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["llama-2-70c", "E100", "--uniform", "tp=8"], "did you mean 'llama-2-70b'?"),
        (["llama-2-70b", "E101", "--uniform", "tp=8"], "E101"),
        (["llama-2-70b", "E100", "--uniform", "tp=3"], "tp 3"),
        (["llama-2-70b", "E100", "--uniform", "tpp=8"], "did you mean 'tp'?"),
        (["llama-2-70b", "E100", "--uniform", "tp=8,tp=4"], "'tp' stands twice"),
        (["llama-2-70b", "E100", "--uniform", "tp=-1"], "whole number 1 to"),
        (["llama-2-70b", "E100", "--uniform", "tp"], "write it like tp=8"),
        (["llama-2-70b", "E100", "--uniform", "tp=8,recompute=ful"], "did you mean 'full'?"),
        (["llama-2-70b", "E100", "--uniform", "tp=8,ep=2"], "has no experts"),
        (["llama-2-70b", "E100", "--uniform", "tp=8,dp=99"], "'E100' has 128"),
        (["llama-2-70b", "E100", "--uniform", "tp=8,pp=128"], "= 1024 chips; 'E100' has 128"),
        (["llama-2-70b", "E100", "--uniform", "tp=8,vpp=2"], "needs --schedule interleaved"),
        (
            ["llama-2-70b", "E100", "--uniform", "tp=8", "--schedule", "1f1"],
            "did you mean '1f1b'?",
        ),
        (
            ["llama-2-70b", "E100", "--uniform", "tp=8", "--precision", "bf17"],
            "did you mean 'bf16'?",
        ),
        (["llama-2-70b", "E100", "--uniform", "tp=8", "--global-batch", "7"], "does not divide"),
        (["llama-2-70b", "E100", "--uniform", "tp=8", "--global-batch", "-7"], "at least 1"),
        (["llama-2-70b", "E100", "--uniform", "tp=8", "--global-batch", "0"], "at least 1"),
        (["llama-2-70b", "E100", "--uniform", "tp=8", "--sequence-length", "0"], "at least 1"),
        (
            ["llama-2-70b", "E100", "--uniform", "tp=8", "--sequence-length", "9999999999"],
            "at most",
        ),
        (["mixtral-8x7b", "E100", "--uniform", "tp=8,pp=4,ep=6"], "ep=6"),
    ],
)
def test_clumsy_arguments_get_one_line(arguments, said, capsys, tmp_path):
    target = tmp_path / "never.json"
    code, out, err = tutti(capsys, "plan", *arguments, "-o", str(target))
    assert code == 2
    assert out == ""
    assert said in err
    assert len(err.strip().splitlines()) == 1
    assert not target.exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not valid JSON"),
        ("[]", "not a plan"),
        ("{}", "has no 'format'"),
        ('{"format": "tutti-plan/9"}', "this version of tutti reads 'tutti-plan/1'"),
        ('{"format": "tutti-plan/1"}', "'model' is missing"),
        ('{"format": "tutti-plan/1", "modell": 1}', "did you mean 'model'?"),
    ],
)
def test_files_that_are_no_plans(text, said, capsys, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(text)
    code, _, err = tutti(capsys, "show", str(path))
    assert code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_an_edited_model_is_noticed(plan, capsys):
    plan.write_text(plan.read_text().replace('"num_layers": 80', '"num_layers": 81'))
    code, _, err = tutti(capsys, "show", str(plan))
    assert code == 2
    assert "plan again" in err


def test_a_folder_that_cannot_be_written(capsys):
    code, _, err = tutti(
        capsys, "plan", "llama-2-7b", "S16", "--uniform", "tp=8", "-o", "/proc/nowhere/plan.json"
    )
    assert code == 2
    assert "cannot be written" in err


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout


def test_no_planning_command_imports_torch(plan):
    code = f"""
import sys
from tutti.cli.main import run
for arguments in (
    ["chips"], ["cluster", "show", "E100"], ["cluster", "show", "--here"],
    ["model", "show", "llama-2-7b"], ["show", {str(plan)!r}, "--schedule"],
    ["plan", "llama-2-7b", "S16", "--uniform", "tp=8"],
):
    try:
        run(arguments)
    except SystemExit as stop:
        assert not stop.code, (arguments, stop.code)
import importlib, pkgutil, tutti
for package in ("hardware", "models", "plan", "schedule", "collective"):
    module = importlib.import_module("tutti." + package)
    for found in pkgutil.walk_packages(module.__path__, module.__name__ + "."):
        importlib.import_module(found.name)
heavy = sorted(m for m in ("torch", "transformers", "scipy", "pandas") if m in sys.modules)
print("HEAVY", heavy)
"""
    assert python(code).strip().splitlines()[-1] == "HEAVY []"


def test_help_imports_nothing_heavy():
    code = """
import sys
from tutti.cli.main import run
try:
    run(["--help"])
except SystemExit:
    pass
heavy = ("numpy", "yaml", "torch", "psutil", "tutti.document", "tutti.plan.plan")
print("HEAVY", [m for m in heavy if m in sys.modules])
"""
    assert python(code).strip().splitlines()[-1] == "HEAVY []"


def test_debug_shows_the_traceback(tmp_path):
    command = [sys.executable, "-m", "tutti.cli.main", "--debug", "show", str(tmp_path / "no.json")]
    environment = {k: v for k, v in os.environ.items() if k != "TUTTI_DEBUG"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode != 0
    assert "Traceback" in done.stderr
