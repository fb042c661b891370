"""`tutti bench plan` as a user types it."""

from __future__ import annotations

import json

import pytest

from tests.e2e.test_plan_cli import tutti
from tutti.cli.bench import drawn, plan

ROW = {
    "instance": "S16", "bar": "≤ 1 s", "search_cpu_s": 0.5, "peak_mib": 200.0, "step_time_s": 72.0,
    "mfu": 0.7, "gap_pct": 4.5, "mixed_efficiency_pct": 99.0, "uniform_step_time_s": 130.0,
    "speedup": 1.8, "nominal": ["v100"], "unlimited_memory": [], "summary": "8 × a800 → 8 × v100",
}  # fmt: skip


@pytest.fixture
def workers(monkeypatch):
    """Let every instance answer at once."""
    asked = []

    def answer(name, folder=None, *, quiet):
        asked.append(name)
        return {**ROW, "instance": name} if name != "E100" else {"instance": name, "why": "no room"}

    monkeypatch.setattr(plan, "_in_its_own_process", answer)
    return asked


def test_named_instances(workers, capsys, tmp_path):
    path = tmp_path / "rows.json"
    code, out, err = tutti(capsys, "bench", "plan", "S32", "S16", "S32", "-o", str(path))
    assert code == 0, err
    assert workers == ["S32", "S16"]
    assert "S16 (bar: ≤ 1 s; nominal: v100): 8 × a800 → 8 × v100" in out
    assert f"written to {path}" in out
    assert [row["instance"] for row in json.loads(path.read_text())["rows"]] == ["S32", "S16"]


def test_an_instance_without_an_answer_is_a_failure(workers, capsys):
    code, out, err = tutti(capsys, "bench", "plan", "--json")
    assert workers == ["S16", "S32", "S64", "S128", "E100"]
    assert code == 1
    assert json.loads(out)["rows"][-1]["why"] == "no room"
    assert err == "tutti: bench plan: no answer for E100\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["S17"], "did you mean 'S16'?"),
        (["--all", "S16"], "--all already names every instance"),
        (["--placement", "S16"], "instances of their own"),
        (["--placement", "--opt", "."], "benchmarks of their own"),
        (["--drawn", "2", "--placement"], "benchmarks of their own"),
        (["--drawn", "0"], "0 is too small"),
        (["--drawn", "2", "--only", "2"], "they are 0 to 1"),
        (["--only", "2"], "give both"),
        (["--drawn", "2", "--cpu-seconds", "-1"], "too small"),
        (["--opt", "/nowhere"], "no such folder"),
        (["S16", "-o", "/nowhere/rows.json"], "there is no folder /nowhere"),
    ],
)
def test_clumsy_arguments_get_one_line(workers, arguments, said, capsys):
    code, out, err = tutti(capsys, "bench", "plan", *arguments)
    assert code == 2
    assert out == ""
    assert said in err
    assert len(err.strip().splitlines()) == 1


DRAWN = {
    "question": 0, "title": "8 A100 + 8 V100", "step_s": 2.0, "gap_pct": 3.0, "search_cpu_s": 1.0,
    "gain_pct": 0.5, "changes": [{"kind": "units", "what": "", "gain_pct": 0.5}], "tried": 9,
    "exhausted": True, "below_bound": False, "forms_pct": {"order": -0.1},
    "more_pct": {"a node": 0.1},
}  # fmt: skip


def test_drawn_questions_are_not_asked_twice(monkeypatch, capsys, tmp_path):
    asked = []

    def answer(number, cpu_seconds):
        asked.append((number, cpu_seconds))
        return {**DRAWN, "question": number}

    monkeypatch.setattr(drawn, "in_its_own_process", answer)
    path = tmp_path / "rows.json"
    arguments = ("bench", "plan", "--drawn", "3", "--cpu-seconds", "4", "-o", str(path))
    assert tutti(capsys, *arguments, "--only", "1")[0] == 0
    code, out, err = tutti(capsys, *arguments, "--json")
    assert code == 0, err
    assert asked == [(1, 4.0), (0, 4.0), (2, 4.0)]
    document = json.loads(out)
    assert [row["question"] for row in document["rows"]] == [0, 1, 2]
    assert document["verdict"]["within_1_pct"] == 100.0
    assert document["verdict"]["passes"] is False
    code, out, err = tutti(capsys, *arguments)
    assert "single changes gain nothing on 0 % (bar: 80)" in out
    assert len(asked) == 3
    code, _, err = tutti(capsys, "bench", "plan", "--drawn", "3", "-o", str(path))
    assert code == 2
    assert "30 CPU seconds" in err


@pytest.mark.slow
def test_a_real_instance(capsys):
    code, out, err = tutti(capsys, "bench", "plan", "S16", "--json")
    assert code == 0, err
    (row,) = json.loads(out)["rows"]
    assert row["gap_pct"] < 10
    assert row["peak_mib"] < 1024
