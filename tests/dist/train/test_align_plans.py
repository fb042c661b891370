"""`tutti align` across two plans, as a user types it: rank processes, a fault in one of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.dist.launch.test_train import MODEL
from tests.support.step_dumps import in_two_stages, in_unequal_shares
from tutti.cli.main import app
from tutti.models.load import load_model
from tutti.plan.files import save_plan

# What the ranks of the test run before anything else: rank 1 halves the gradients of unit 2
# with each micro-batch that joins them.
FAULT = """\
import os

if os.environ.get("RANK") == "1":
    from tutti.train.sync.synchronise import Synchronised

    collect = Synchronised.collect

    def wrong(self, start, stop, lent=()):
        collect(self, start, stop, lent)
        states = [state for exchange in self.of_units([2]) for state in exchange.states]
        for state in states if start <= 2 < stop else ():
            parts = state._cut(state.gradient) if state.loose is None else state.loose.values()
            for part in parts:
                part *= 0.5

    Synchronised.collect = wrong
"""


def align(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["align", *map(str, arguments)])


@pytest.fixture
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A model and two plans for it; neither remembers where the model lies."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    spec = load_model(str(model))
    found = {"model": model}
    for name, plan in (("stages", in_two_stages(spec)), ("shares", in_unequal_shares(spec))):
        found[name] = tmp_path / f"{name}.json"
        save_plan(plan, found[name])
    return found


@pytest.mark.slow  # three runs of two processes each; tests/unit/train has it with threads
@pytest.mark.timeout(600)
def test_two_plans_agree_and_a_wrong_scale_is_named(
    plans: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("--model", plans["model"], "--steps", 2)
    kept = tmp_path / "stages"
    result = align("dump", f"plan:{plans['stages']}", "-o", kept, *given)
    assert result.exit_code == 0, result.output

    page = tmp_path / "align.html"
    result = align(kept, f"plan:{plans['shares']}", *given, "--html", page)
    assert result.exit_code == 0, result.output
    assert "2 steps of 6 sequences of 64 tokens, seed 0" in " ".join(result.output.split())
    assert "no divergence in" in result.output
    text = page.read_text()
    assert "<polyline" in text
    assert "plan:shares.json float32 on 2 ranks of pair" in text

    faults = tmp_path / "faults"
    faults.mkdir()
    (faults / "sitecustomize.py").write_text(FAULT)
    monkeypatch.setenv("PYTHONPATH", str(faults), prepend=":")
    result = align(kept, f"plan:{plans['shares']}", *given, "--json")
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert (found["first_step"], found["first_unit"]) == (1, 2)
    assert found["first_divergence"].startswith("step-1/gradient/2.")
    assert found["losses"][0]["a"] == pytest.approx(found["losses"][0]["b"], rel=1e-6)


def test_plans_of_other_jobs_are_refused_before_anything_runs(
    plans: dict[str, Path], tmp_path: Path
) -> None:
    plan = in_unequal_shares()
    plan = replace(plan, job=replace(plan.job, optimizer="sgd"))
    save_plan(plan, tmp_path / "other.json")
    result = align(f"plan:{plans['stages']}", f"plan:{tmp_path / 'other.json'}")
    assert result.exit_code != 0
    assert "optimizer is sgd" in str(result.exception or result.output)
