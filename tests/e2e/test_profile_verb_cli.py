"""`tutti profile`, `tutti bench blocks` and `--chip-profile` as a user types them; tiny shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.e2e.test_plan_cli import tutti
from tests.support.measured import measured_profile
from tutti.accelerator.profiling.cases import ProfileCase
from tutti.hardware.chip import Dtype
from tutti.hardware.profile import OperatorTime, Profile

TINY = [
    ProfileCase("linear", (64, 64, 64)),
    ProfileCase("linear", (64, 128, 64)),
    ProfileCase("attention", (1, 64, 4, 4, 16, 16)),
    ProfileCase("rms_norm", (64, 64)),
    ProfileCase("copy", (4096,)),
]


@pytest.fixture
def tiny(monkeypatch):
    """A few shapes, one visit each: done long before any budget."""
    monkeypatch.setattr("tutti.accelerator.profiling.grid.default_cases", lambda: list(TINY))
    monkeypatch.setattr("tutti.accelerator.profiling.session.MOST_VISITS", 1)
    monkeypatch.setattr("tutti.accelerator.profiling.session.FIRST_SIDE", 64)
    monkeypatch.setattr("tutti.accelerator.profiling.session.LAST_SIDE", 64)
    monkeypatch.setattr("tutti.accelerator.profiling.workspace.HOST_ELEMENTS", 1 << 18)
    monkeypatch.setattr("tutti.accelerator.profiling.links.HOST_LARGE_BYTES", 1 << 20)


ARGUMENTS = ("--device", "cpu", "--budget", "10min")


def test_a_profile_is_written_shown_and_resumed(tiny, tmp_path, capsys):
    path, page = tmp_path / "cpu.json", tmp_path / "cpu.html"
    code, out, err = tutti(capsys, "profile", "-o", str(path), *ARGUMENTS, "--html", str(page))
    assert code == 0, err
    assert "linear.weight_gradient fp32" in out
    assert f"11 measurements written to {path}" in " ".join(out.split())
    found = Profile.load(path)
    assert found.chip == "CPU"
    assert "thread" in found.stack
    assert found.origin == "tutti profile --budget 10min"
    assert found.dtypes == (Dtype.FP32,)
    assert {row.kernel for row in found.operators} >= {"reference"}
    assert found.link("memory") is not None
    assert "Profile of CPU" in page.read_text()
    code, out, _ = tutti(
        capsys, "profile", "-o", str(path), *ARGUMENTS, "--resume", "--dtype", "bf16", "--json"
    )
    assert code == 0
    said = json.loads(out)
    assert said["measurements"] == 22
    assert said["interrupted"] is False
    assert said["refused"] == {}
    assert Profile.load(path).dtypes == (Dtype.FP32, Dtype.BF16)


def test_a_models_shapes_come_first(tiny, tmp_path, capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "tutti.accelerator.profiling.session.Session._visit",
        lambda self, case: seen.append(case) or self._samples.setdefault((case, "forward")),
    )
    monkeypatch.setattr(
        "tutti.accelerator.profiling.session.Session.profile", lambda self: measured_profile("CPU")
    )
    # Whether a case is too large is estimated by timing: a busy machine is not to decide this test.
    monkeypatch.setattr(
        "tutti.accelerator.profiling.session.Session._too_large", lambda self, case: False
    )
    path = tmp_path / "p.json"
    code, _, err = tutti(
        capsys, "profile", "smollm2-135m", "-o", str(path), *ARGUMENTS, "--tokens", "256",
        "--sequence-length", "128",
    )  # fmt: skip
    assert code == 0, err
    assert seen[0].operator == "linear"
    assert seen[0].shape[0] == 256
    assert seen[-1] in TINY


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "0"], "--budget is '0'; give a time above 0"),
        (["--budget", "soon"], "--budget is 'soon'; write it like"),
        (["--budget", "3 parsec"], "unknown unit 'parsec'"),
        (["--tokens", "many"], "--tokens is 'many'; write whole numbers"),
        (["--device", "warp"], "device 'warp': no kind 'warp'"),
        (["--device", "cpu:7"], "device 'cpu:7': this machine has 1"),
        (["--device", "cpu", "--dtype", "fp3"], "--dtype is 'fp3'; did you mean 'fp32'?"),
        (["--device", "cpu", "--html", "."], ".: is a folder; name a file"),
        (["--device", "cpu", "no-such-model"], "no-such-model: neither a folder"),
        (["--device", "cpu", "--budget", "1ns"], "over before the first measurement"),
    ],
)
def test_bad_questions_are_one_line(tiny, tmp_path, capsys, arguments, message):
    path = tmp_path / "p.json"
    code, out, err = tutti(capsys, "profile", "-o", str(path), *arguments)
    assert code == 2, out
    assert message in err
    assert len(err.splitlines()) == 1
    assert not path.exists()


def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path, capsys):
    code, _, err = tutti(capsys, "profile", "-o", str(tmp_path / "no" / "p.json"))
    assert code == 2
    assert "cannot be written (there is no folder" in err
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o500)
    if not os.access(locked, os.W_OK):  # root writes anywhere
        code, _, err = tutti(capsys, "profile", "-o", str(locked / "p.json"))
        assert code == 2
        assert "permission denied" in err


def test_resuming_another_chips_file_is_refused(tiny, tmp_path, capsys):
    path = tmp_path / "p.json"
    measured_profile("H200").save(path)
    code, _, err = tutti(capsys, "profile", "-o", str(path), *ARGUMENTS, "--resume")
    assert code == 2
    assert "--resume: " in err
    assert "is of 'H200', but this is 'CPU'; choose another file" in err
    measured_profile("CPU").save(path)
    code, _, err = tutti(capsys, "profile", "-o", str(path), *ARGUMENTS, "--resume")
    assert code == 2
    assert "--resume: the file was measured with 'a known chip', this is 'torch" in err


def test_without_torch_it_is_one_line(tmp_path):
    (tmp_path / "torch").mkdir()
    script = (
        "import importlib.util, sys\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda n, *a: None if n == 'torch' else real(n, *a)\n"
        "from tutti.cli.main import run\n"
        "run(sys.argv[1:])\n"
    )
    for verb in (["profile", "-o", str(tmp_path / "p.json")], ["bench", "blocks"]):
        done = subprocess.run(
            [sys.executable, "-c", script, *verb], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 2
        assert "needs torch; install it: pip install" in done.stderr
        assert len(done.stderr.splitlines()) == 1


# --- plans -----------------------------------------------------------------------------------


@pytest.fixture
def plan(tmp_path, capsys):
    cluster = tmp_path / "node.yaml"
    cluster.write_text("name: node\npools:\n- {name: h200, node: HGX-H200, nodes: 1}\n")
    path = tmp_path / "plan.json"
    code, _, err = tutti(
        capsys, "plan", "llama-3.2-1b", str(cluster), "--uniform", "dp=8,mbs=2",
        "--global-batch", "32", "-o", str(path),
    )  # fmt: skip
    assert code == 0, err
    return path


def test_a_plan_is_priced_by_a_chips_profile(plan, tmp_path, capsys):
    path = tmp_path / "h200.json"
    measured_profile().save(path)
    code, out, err = tutti(capsys, "predict", str(plan), "--chip-profile", str(path))
    assert code == 0, err
    said = " ".join(out.split())
    assert "predicted from h200: profile of H200 (a known chip, 2026-01-31)" in said
    _, out, _ = tutti(capsys, "predict", str(plan), "--chip-profile", str(path), "--json")
    measured = json.loads(out)
    assert measured["extrapolations"] == []
    _, out, _ = tutti(capsys, "predict", str(plan), "--json")
    assert json.loads(out)["step_time_s"] != measured["step_time_s"]
    code, _, err = tutti(capsys, "simulate", str(plan), "--chip-profile", str(path))
    assert code == 0, err
    code, out, err = tutti(
        capsys, "plan", "llama-3.2-1b", str(tmp_path / "node.yaml"), "--global-batch", "32",
        "--chip-profile", str(path), "--json",
    )  # fmt: skip
    assert code == 0, err


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (measured_profile("A800"), "profile of A800: the plan runs on H200; measure it there"),
        (
            measured_profile(dtype=Dtype.FP32),
            "no 'linear' in bf16; it measured fp32; run tutti profile --dtype bf16",
        ),
    ],
    ids=["another chip", "another format"],
)
def test_a_profile_of_something_else_is_one_line(plan, tmp_path, capsys, profile, message):
    path = tmp_path / "p.json"
    profile.save(path)
    code, _, err = tutti(capsys, "predict", str(plan), "--chip-profile", str(path))
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1


def test_bad_chip_profiles_are_one_line(plan, tmp_path, capsys):
    code, _, err = tutti(capsys, "predict", str(plan), "--chip-profile", "h2000")
    assert code == 2
    assert "profile 'h2000': no such file, and none ships" in err
    code, _, err = tutti(
        capsys, "predict", str(plan), "--chip-profile", "x.json", "--profile", str(tmp_path)
    )
    assert code == 2
    assert "--profile and --chip-profile both price units; give one of them" in err


# --- blocks ----------------------------------------------------------------------------------


def test_blocks_are_timed_beside_their_prediction(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tutti.bench.block_runs.HOST_SHAPES", {"llama-64": (64, 4, 2, 128, 2, 16)})
    # the known chip is a thousand times faster than a host: its products would take minutes
    monkeypatch.setattr("tutti.bench.block_runs.ANCHORS", 0)
    path = tmp_path / "cpu.json"
    measured_profile("CPU", Dtype.FP32).save(path)
    code, out, err = tutti(
        capsys, "bench", "blocks", "--device", "cpu", "--profile", str(path), "--rounds", "3",
        "--json",
    )  # fmt: skip
    assert code == 0, err
    found = json.loads(out)
    plain, ours, theirs = found["rows"]
    assert [row["who"] for row in found["rows"]] == ["tutti", "tutti, summed", "transformers"]
    assert min(plain["step_s"], ours["step_s"]) > 0
    assert "predicted_s" not in plain  # a profile has products that add to sums, as a step's do
    assert ours["predicted_s"] == pytest.approx(
        ours["predicted_forward_s"] + ours["predicted_backward_s"]
    )
    assert ours["error"] == pytest.approx(ours["predicted_s"] / ours["step_s"] - 1)
    assert found["predicted"] == 1
    assert "tutti_speedup" in theirs
    code, out, _ = tutti(
        capsys, "bench", "blocks", "--device", "cpu", "--rounds", "1", "--no-peers"
    )
    assert code == 0
    assert "llama-64" in out


def test_the_pace_is_that_of_products_timed_again():
    from tutti.accelerator import open_accelerator
    from tutti.accelerator.profiling.timer import HostTimer
    from tutti.bench.block_runs import anchors_of, drift, time_runs

    row = OperatorTime(
        operator="linear.forward", dtype=Dtype.FP32, shape=(16, 16, 16), seconds=0.01
    )
    profile = replace(measured_profile("CPU"), operators=(row,))
    timer = HostTimer()
    (anchor,) = anchors_of(profile, open_accelerator("cpu"), Dtype.FP32, timer)
    time_runs([], timer, 3, [anchor])
    assert len(anchor.samples.seconds) == 3
    anchor.samples.seconds = [0.02, 0.03, 0.01]
    assert drift([anchor]) == pytest.approx(2.0)


def test_blocks_by_another_chips_profile_are_refused(tmp_path, capsys):
    path = tmp_path / "h200.json"
    measured_profile("H200").save(path)
    code, _, err = tutti(capsys, "bench", "blocks", "--device", "cpu", "--profile", str(path))
    assert code == 2
    assert "is of 'H200', but this is 'CPU'; measure it with tutti profile" in err
