"""`--profile` and `--from-profile` as a user types them."""

from __future__ import annotations

import json

import pytest

from tests.e2e.test_plan_cli import tutti
from tests.unit.cost.calibration.test_operators_fit import full_profile
from tests.unit.cost.layer_folder import write_folder


@pytest.fixture
def plan(tmp_path, capsys):
    path = tmp_path / "plan.json"
    arguments = ["opt-350m", "OPT-8", "--uniform", "pp=2,mbs=2", "--sequence-length", "2048"]
    code, _, err = tutti(capsys, "plan", *arguments, "--global-batch", "256", "-o", str(path))
    assert code == 0, err
    return path


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "layers")


def test_predict_by_a_layer_profile(plan, folder, capsys):
    code, out, err = tutti(capsys, "predict", str(plan), "--profile", str(folder))
    assert code == 0, err
    said = " ".join(out.split())
    assert "a100: layer profile layers (A100 for A100-40-opt, tp 1 2, batches 1 to 4)" in said
    assert "extrapolated" not in out
    _, out, _ = tutti(capsys, "predict", str(plan), "--profile", str(folder), "--json")
    found = json.loads(out)
    # 16 micro-batches through a V100 stage of 12 units at 5 ms and a head at 10 ms
    assert 16 * 14 * 5e-3 < found["step_time_s"] < 1.2 * 16 * 14 * 5e-3
    assert sum(found["parts_s"].values()) == pytest.approx(found["step_time_s"])


def test_simulate_by_a_layer_profile(plan, folder, capsys):
    times = []
    for extra in ([], ["--profile", str(folder)]):
        code, out, err = tutti(capsys, "simulate", str(plan), "--json", *extra)
        assert code == 0, err
        times.append(json.loads(out)["step_seconds"])
    assert times[1] > 16 * 14 * 5e-3
    assert times[0] != times[1]


def test_extrapolation_is_refused_or_said(plan, folder, capsys):
    for path in folder.glob("*_bs[24].json"):
        path.unlink()
    arguments = ["predict", str(plan), "--profile", str(folder)]
    code, _, err = tutti(capsys, *arguments)
    assert code == 2
    assert "2 sequences per micro-batch outside the measured 1 only" in err
    assert len(err.splitlines()) == 1
    code, out, err = tutti(capsys, *arguments, "--extrapolate")
    assert code == 0, err
    assert "extrapolated beyond what was measured" in out
    code, out, _ = tutti(capsys, *arguments, "--extrapolate", "--json")
    assert len(json.loads(out)["extrapolations"]) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--extrapolate"], "--extrapolate goes with --profile"),
        (["--profile", "nowhere"], "nowhere: no such folder"),
    ],
)
@pytest.mark.parametrize("verb", ["predict", "simulate"])
def test_clumsy_options_get_one_line(plan, capsys, verb, arguments, said):
    code, _, err = tutti(capsys, verb, str(plan), *arguments)
    assert code == 2
    assert said in err
    assert len(err.splitlines()) == 1


def test_calibrate_from_a_profile(tmp_path, capsys):
    file, output = tmp_path / "a100.json", tmp_path / "calibrations"
    full_profile(noise=0.02).save(file)
    arguments = ["calibrate", "--from-profile", str(file), "-o", str(output)]
    code, out, err = tutti(capsys, *arguments)
    assert code == 0, err
    assert "operator measurements: " in out
    (written,) = output.iterdir()
    found = json.loads(written.read_text())
    assert found["origin"] == "made up by a test"
    assert found["compute"]["gemm_efficiency"]["value"] == pytest.approx(0.78, rel=0.02)
    code, out, _ = tutti(capsys, *arguments, "--json")
    assert json.loads(out)["rule"][written.stem] == found["rule"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give either RUNS"),
        (["runs.csv", "--from-profile", "a.json"], "give either RUNS"),
        (["--from-profile", "nowhere.json"], "no such file"),
    ],
)
def test_calibrate_wants_one_source(tmp_path, capsys, arguments, said):
    code, _, err = tutti(capsys, "calibrate", *arguments, "-o", str(tmp_path / "out"))
    assert code == 2
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 2}', '{"format": 1, "chip": "A100"}'])
def test_a_broken_profile_is_one_line(tmp_path, capsys, text):
    file = tmp_path / "broken.json"
    file.write_text(text)
    code, _, err = tutti(capsys, "calibrate", "--from-profile", str(file), "-o", str(tmp_path))
    assert code == 2
    assert "broken.json" in err
    assert len(err.splitlines()) == 1
