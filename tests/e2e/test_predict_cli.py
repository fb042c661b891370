"""`tutti predict` and `tutti simulate` as a user types them."""

from __future__ import annotations

import json
import re

import pytest

from tests.e2e.test_plan_cli import tutti
from tests.support.any_plan import PLANS
from tutti.plan.files import save_plan


@pytest.fixture
def plan(tmp_path, capsys):
    path = tmp_path / "plan.json"
    arguments = ["llama-2-70b", "E100", "--uniform", "tp=8,pp=4,sp=1,shard=1"]
    code, _, err = tutti(capsys, "plan", *arguments, "--global-batch", "256", "-o", str(path))
    assert code == 0, err
    return path


def test_predict_says_time_memory_mfu_and_what_it_rests_on(plan, capsys):
    code, out, _ = tutti(capsys, "predict", str(plan))
    assert code == 0
    assert "per step" in out
    assert "MFU" in out
    assert "fits: the tightest is stage 0" in out
    assert "a800: calibrated: megatron-a100" in out
    assert "p800: nominal, not measured" in out


def test_predict_as_json(plan, capsys):
    _, out, _ = tutti(capsys, "predict", str(plan), "--json")
    found = json.loads(out)
    assert sum(found["parts_s"].values()) == pytest.approx(found["step_time_s"])
    assert 0.2 < found["mfu"] < 0.8
    assert found["fits"] is True
    assert {m["pool"] for m in found["memory"]} == {"a800", "p800"}
    assert found["tokens_per_s"] == pytest.approx(256 * 4096 / found["step_time_s"])


def test_memory_by_passes_that_were_measured_here(tmp_path, capsys):
    path = tmp_path / "plan.json"
    save_plan(PLANS["sequence parallel into plain tensor parallel"], path)
    moving = {}
    for name, words in {"counted": (), "measured": ("--measure-memory", "cpu")}.items():
        code, out, err = tutti(capsys, "predict", str(path), "--json", *words)
        assert code == 0, err
        document = json.loads(out)
        moving[name] = [each["moving_bytes"] for each in document["memory"]]
        parameters = [each["parameters_bytes"] for each in document["memory"]]
        assert all(size > 0 for size in parameters)
    assert moving["measured"] != moving["counted"]
    assert all(0.5 < b / a < 2 for a, b in zip(moving["counted"], moving["measured"], strict=True))


def test_measured_memory_beside_a_layer_profile_is_refused(plan, tmp_path, capsys):
    code, _, err = tutti(
        capsys, "predict", str(plan), "--measure-memory", "cpu", "--profile", str(tmp_path)
    )
    assert code != 0
    assert "leave --measure-memory out" in err


def test_what_does_not_fit_is_an_answer(tmp_path, capsys):
    path = tmp_path / "big.json"
    tutti(capsys, "plan", "gpt-3-175b", "S16", "--uniform", "tp=8,dp=2", "-o", str(path))
    code, out, _ = tutti(capsys, "predict", str(path))
    assert code == 0
    assert "does not fit" in out


def test_simulate_writes_page_and_trace(plan, capsys, tmp_path):
    page, trace = tmp_path / "step.html", tmp_path / "step.json"
    code, out, err = tutti(
        capsys, "simulate", str(plan), "--html", str(page), "--trace", str(trace),
        "--jitter", "0.02", "--slow", "p800=1.5",
    )  # fmt: skip
    assert code == 0, err
    assert "with jitter" in out
    assert "<canvas" in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]


def test_the_step_is_one_figure_everywhere(plan, capsys, tmp_path):
    page = tmp_path / "step.html"
    _, out, _ = tutti(capsys, "simulate", str(plan), "--html", str(page))
    _, predicted, _ = tutti(capsys, "predict", str(plan))
    step = re.search(r"([\d.]+ m?s) per step", predicted)[1]
    without = re.match(rf"step {step} \(([\d.]+ m?s) without the slowest node\)", out)[1]
    assert without != step
    text = page.read_text().replace("\u00a0", " ")  # before a unit
    assert f"<dd>{step}<small>{without} without the slowest node, as drawn" in text


def test_one_node_is_not_the_slowest(tmp_path, capsys):
    path = tmp_path / "node.json"
    document = {"name": "one", "pools": [{"name": "a800", "chip": "A800", "nodes": 1}]}
    (tmp_path / "one.json").write_text(json.dumps(document))
    arguments = ["llama-3.2-1b", str(tmp_path / "one.json"), "--uniform", "tp=1,dp=8"]
    code, _, err = tutti(capsys, "plan", *arguments, "-o", str(path))
    assert code == 0, err
    _, out, _ = tutti(capsys, "predict", str(path))
    assert "activations, buffers" in out
    assert "slowest node" not in out
    assert "slowest node" not in tutti(capsys, "simulate", str(path))[1]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("p.json", '{"format": 2, "chip": "A800", "operators": []}', "is a chip's profile (--chip"),
        ("c.json", '{"name": "x", "pools": []}', "is a cluster file; expected a plan"),
        ("m.json", '{"model_type": "llama"}', "is a model's config.json; expected a plan"),
        ("t.yaml", "model: x", "is YAML; expected a plan"),
        ("old.json", '{"format": "tutti-plan/0"}', "'format' is 'tutti-plan/0'; this version"),
    ],
)
def test_what_is_no_plan_is_called_by_its_name(tmp_path, capsys, name, text, said):
    (tmp_path / name).write_text(text)
    code, _, err = tutti(capsys, "predict", str(tmp_path / name))
    assert code == 2
    assert said in err


def test_a_slow_pool_slows_the_step(plan, capsys):
    times = []
    for extra in ([], ["--slow", "p800=1.5"]):
        _, out, _ = tutti(capsys, "simulate", str(plan), "--json", *extra)
        times.append(json.loads(out)["step_seconds"])
    assert 1.2 < times[1] / times[0] < 1.6


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--slow", "p801=1.5"], "did you mean 'p800'?"),
        (["--slow", "zzz=2"], "no pool or class 'zzz'; pools: a800, p800; classes: stage 0, stage"),
        (["--slow", "p800"], "write it like a800=1.2"),
        (["--slow", "p800=-1"], "write it like a800=1.2"),
        (["--jitter", "-1"], "jitter is -1"),
        (["--html", "/proc/nowhere/x.html"], "cannot be written"),
    ],
)
def test_clumsy_options_get_one_line(plan, capsys, extra, said):
    code, _, err = tutti(capsys, "simulate", str(plan), *extra)
    assert code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_own_calibrations_come_first(plan, capsys, tmp_path):
    from tutti.cost.calibration.shipped import load_calibration

    shipped = load_calibration("A800")
    own = tmp_path / "own"
    own.mkdir()
    text = shipped.save(own).read_text().replace("2026-", "2027-")
    (own / f"{shipped.name}.json").write_text(text)
    _, out, _ = tutti(capsys, "predict", str(plan), "--calibrations", str(own))
    assert ", 2027-" in out
    for folder, said in [("nowhere", "cannot be read"), ("", "holds no calibration")]:
        (tmp_path / "bare").mkdir(exist_ok=True)
        code, _, err = tutti(
            capsys, "predict", str(plan), "--calibrations", str(tmp_path / (folder or "bare"))
        )
        assert code == 2
        assert said in err


def test_nothing_that_was_read_is_overwritten(plan, capsys, tmp_path):
    before = plan.read_text()
    page = str(tmp_path / "x.html")
    for extra in (["--html", str(plan)], ["--html", page, "--trace", page]):
        code, _, err = tutti(capsys, "simulate", str(plan), *extra)
        assert code == 2
        assert "choose another name" in err
    assert plan.read_text() == before


def test_narrow_formats_are_faster_where_a_chip_has_them(tmp_path, capsys):
    cluster = tmp_path / "h100.yaml"
    cluster.write_text("name: h100\npools: [{name: h100, chip: H100, nodes: 4}]\n")
    times = []
    for compute in ("bf16", "fp8"):
        options = ["--uniform", "tp=8,pp=4,sp=1,shard=1", "--global-batch", "256"]
        options += ["--precision", compute, "-o", str(tmp_path / f"{compute}.json")]
        code, _, err = tutti(capsys, "plan", "llama-2-70b", str(cluster), *options)
        assert code == 0, err
        _, out, _ = tutti(capsys, "predict", str(tmp_path / f"{compute}.json"), "--json")
        times.append(json.loads(out)["step_time_s"])
    assert times[1] < times[0]


def test_a_chip_without_a_format_refuses_it_in_one_line(plan, capsys):
    document = json.loads(plan.read_text())
    document["job"]["precision"] = {"compute": "fp8"}
    plan.write_text(json.dumps(document))
    code, _, err = tutti(capsys, "predict", str(plan), "--json")
    assert code == 2
    assert "chip 'A800' cannot compute in fp8; it has" in err
