"""Runs as their folders tell them, and the page of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from tests.support.finished_runs import SHARES, finished_run
from tutti.errors import InputError
from tutti.observe.folder import METRICS
from tutti.observe.history import read_run
from tutti.report.curves import Curve, curves_html, nice_ticks, tick_texts
from tutti.report.training import baseline_of, shared_step, training_page


def test_a_run_is_read_without_its_warm_up(tmp_path):
    run = read_run(finished_run(tmp_path / "planned", seconds=0.5))
    assert (run.name, run.num_ranks, run.uniform) == ("planned", 2, False)
    assert run.seconds == pytest.approx(0.5)
    assert run.tokens_per_s == pytest.approx(2000)
    assert run.predicted_s == pytest.approx(0.45)
    assert [step.step for step in run.steps] == [1, 2, 3, 4, 5, 6]
    assert run.validation == [(3, 1.5), (6, 0.75)]
    for pool in run.pools:
        assert sum(pool.parts.values()) == pytest.approx(0.5)  # the parts add up to the step
        assert pool.parts["compute"] == pytest.approx(0.5 * SHARES[pool.pool])


def test_a_line_that_was_cut_off_by_a_kill_is_left_out(tmp_path):
    path = finished_run(tmp_path / "run") / METRICS
    path.write_text(path.read_text() + '{"step": 7, "lo')
    assert read_run(path.parent).steps[-1].step == 6
    path.write_text("{\n" + path.read_text())
    with pytest.raises(InputError, match="line 1"):
        read_run(path.parent)


def test_a_folder_without_figures_is_answered_in_one_line(tmp_path):
    with pytest.raises(InputError, match=r"has no metrics\.jsonl"):
        read_run(tmp_path)
    with pytest.raises(InputError, match="nowhere: no such folder"):
        read_run(tmp_path / "nowhere")
    folder = finished_run(tmp_path / "empty", steps=0)
    with pytest.raises(InputError, match="has no step"):
        read_run(folder)


def test_losses_compare_at_a_step_that_all_runs_have(tmp_path):
    long = read_run(finished_run(tmp_path / "planned", steps=9))
    short = read_run(finished_run(tmp_path / "uniform", uniform=True))
    assert shared_step([long, short]) == 6
    assert shared_step([short, short]) is None
    page = training_page([long, short]).html()
    assert "loss, step 6" in page
    assert f"{long.loss_at(6):.4f}" in page
    assert "loss, step" not in training_page([short]).html()


def test_a_run_that_is_called_by_its_kind_is_not_called_so_twice(tmp_path):
    runs = [read_run(finished_run(tmp_path / name)) for name in ("planned", "other")]
    page = training_page(runs).html()
    assert "planned<small></small>" in page
    assert "other<small>planned</small>" in page


def test_runs_are_compared_with_the_uniform_one(tmp_path):
    uniform = read_run(finished_run(tmp_path / "uniform", seconds=0.9, uniform=True))
    planned = read_run(finished_run(tmp_path / "planned", seconds=0.5))
    other = read_run(finished_run(tmp_path / "other", seconds=0.6))
    assert baseline_of([uniform, planned]) is uniform
    assert baseline_of([planned, other]) is other
    html = training_page([uniform, planned]).html()
    assert "1.80 ×" in html
    assert "1.00 ×" in html
    assert re.search(r"<h2>Throughput</h2>", html)


def test_the_page_of_one_run_shows_every_figure(tmp_path):
    html = training_page([read_run(finished_run(tmp_path / "run"))]).html()
    for text in ("Validation loss", "Tokens per second", "MFU", "predicted 450", "−10.0 %"):
        assert text in html
    assert "Throughput</h2>" not in html  # nothing to compare with
    for part in ("compute", "communication", "bubble", "copies", "data", "other"):
        assert f"{part} " in html
    assert html.count("<polyline") == 4  # loss, validation, tokens per second, MFU


def test_what_is_learnt_from_answers_is_drawn_where_it_was_told(tmp_path):
    folder = finished_run(tmp_path / "run")
    told = ("Reward of sampled answers", "Margin of chosen answers")
    assert not any(title in training_page([read_run(folder)]).html() for title in told)
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    for line in lines:
        if "loss" in line:
            line |= {"margin": 0.5, "sampled": {"reward": 0.125 * line["step"]}}
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(folder)
    assert [step.reward for step in run.steps][:2] == [0.125, 0.25]
    assert all(title in training_page([run]).html() for title in told)
    html = training_page([replace(run, validation=[(2, -0.75)])]).html()
    assert "Held-out reward" in html
    assert "0.7500" in html
    assert "Validation loss" not in html
    assert "-0.7500" not in html


def test_emulated_runs_say_so_and_say_when_they_do_not_count(tmp_path):
    run = read_run(finished_run(tmp_path / "run", overrun=0.02))
    assert "· emulated" not in training_page([run]).html()
    html = training_page([replace(run, emulated=True)]).html()
    assert "· emulated" in html
    assert "2.0 %" in html
    assert "do not count" not in html
    late = replace(run, emulated=True, overrun=0.2)
    assert "do not count" in training_page([late]).html()
    assert "do not count" in training_page([late, replace(run, name="b")]).html()


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (3.97, 4.03), (5.0, 5.0), (0.0, 0.0), (-2.0, 1e6), (1.0, 8.0)]
)
def test_ticks_are_round_and_hold_all_values(low, high):
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low <= high <= ticks[-1]
    assert 3 <= len(ticks) <= 9
    assert ticks == sorted(set(ticks))


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (5.0870, 5.0966, ["5.0850", "5.0875", "5.0900", "5.0925", "5.0950", "5.0975"]),
        (5.0901980, 5.0901986, None),
        (3.2, 5.9, ["3", "4", "5", "6"]),
        (0.0, 1.2e6, ["0", "500000", "1000000", "1500000"]),
    ],
)
def test_what_stands_at_ticks_is_exact_and_distinct(low, high, said):
    ticks = nice_ticks(low, high)
    texts = tick_texts(ticks, None)
    assert said is None or texts == said
    assert len(set(texts)) == len(texts)
    assert [float(text) for text in texts] == pytest.approx(ticks, rel=1e-12)
    assert tick_texts(ticks, lambda value: f"{value:.2g}" if high > 100 else "5.09") == (
        [f"{value:.2g}" for value in ticks] if high > 100 else texts
    )


def test_a_curve_leaves_out_what_is_no_number_and_thins_what_is_long():
    points = [(float(i), float("nan") if i == 3 else float(i)) for i in range(5000)]
    html = curves_html("x", [Curve(name="a", color="series-1", points=points)], text=str)
    assert "nan" not in html
    drawn = re.search(r'<polyline points="([^"]+)"', html)[1].split()
    assert len(drawn) == 600
    assert curves_html("x", [Curve(name="a", color="series-1", points=[])], text=str) == ""
