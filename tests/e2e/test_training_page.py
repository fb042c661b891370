"""The pages of runs and of real steps, opened in headless Chromium, and the verb behind them."""

from __future__ import annotations

import json
import re

from typer.testing import CliRunner

from tests.e2e.test_report_page import browse, console
from tests.e2e.test_report_page import pytestmark as pytestmark
from tests.support.finished_runs import finished_run
from tests.support.real_steps import as_measured
from tests.unit.simulate.test_compare import result as result
from tutti.cli.main import app
from tutti.report.overlay import write_overlay_page


def test_runs_beside_each_other(tmp_path):
    planned = finished_run(tmp_path / "planned", seconds=0.5)
    uniform = finished_run(tmp_path / "alike", seconds=0.9, uniform=True)
    page = tmp_path / "runs.html"
    words = ["report", str(planned), f"uniform={uniform}", "--html", str(page)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "1.80" in done.output
    dom, log = browse(page, tmp_path)
    assert console(log) == []
    assert dom.count("<svg") == 3
    assert "planned" in dom
    assert "uniform" in dom


def test_the_figures_as_json(tmp_path):
    folder = finished_run(tmp_path / "planned")
    done = CliRunner().invoke(app, ["report", str(folder), "--json"])
    found = json.loads(done.output)["runs"][0]
    assert (found["name"], found["ratio"], len(found["steps"])) == ("planned", 1.0, 6)


def test_a_real_step_over_the_simulated_one(result, tmp_path):
    page = tmp_path / "over.html"
    write_overlay_page(page, result, as_measured(result, 1.3))
    dom, log = browse(page, tmp_path)
    assert console(log) == []
    assert 'data-drawn="gantt"' in re.search(r"<html[^>]*>", dom)[0]
    assert "1.300" in dom
