"""Timed chips of speeds 4:4:2:1: one is lost and comes back, one becomes slow and well again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.timed_chips import Watched, emulation, job_of, run_beside, write
from tutti.elastic.operator_requests import OperatorRequest, wish
from tutti.observe.figures import key
from tutti.observe.folder import EVENTS, SERIES
from tutti.observe.store import SeriesStore
from tutti.search.planner import plan_uniform
from tutti.train.elastic.better_plan import parts_of, position_of
from tutti.train.run.planning import prepared, problem_of
from tutti.train.run.trainer import run_local


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_fast_chip_is_lost_and_comes_back(tmp_path: Path) -> None:
    write(tmp_path)
    job = job_of(tmp_path, "run", elastic={})
    watched = Watched(job.config.folder)
    run_beside(job, watched, [
        lambda: watched.until(lambda: len(watched.records()) > 3),
        lambda: watched.steps("before"),
        lambda: wish(watched.folder, OperatorRequest(kind="drain", place="fast/0/1")),
        lambda: watched.decided("replanned", "stays", after=4),
        lambda: watched.until(lambda: watched.entries()[-1].phase == "running"),
        lambda: watched.steps("without"),
        lambda: wish(watched.folder, OperatorRequest(kind="add", place="fast/0/1")),
        lambda: watched.until(lambda: len(watched.entries()[-1:]) and [
            len(e.ranks) for e in watched.entries() if e.phase == "entering"][-1] == 4),
        lambda: watched.until(lambda: watched.entries()[-1].phase == "running"),
        lambda: watched.steps("back"),
    ])  # fmt: skip
    there = {position_of(chip) for chip in ("fast/0/0", "middle/0/0", "slow/0/0")}
    parts = parts_of(job, there, {})
    uniform = plan_uniform(problem_of(job.config, job.spec, parts.cluster))
    assert not isinstance(uniform, str)
    alike = prepared(
        job_of(tmp_path, "uniform", steps=8).config, parts.to_real(uniform.plan), job.spec
    )
    slow_s = run_local(alike).seconds_per_step
    restarted = emulation(Watched(alike.config.folder).records(), 2)
    for name in watched.marks:
        seen = watched.emulation(name)
        print(f"{name}: {watched.step_s(name):.3f} s a step, emulated {seen.due_s:.3f} s, "
              f"overrun {seen.overrun:.0%}")  # fmt: skip
    gain = restarted.due_s / watched.emulation("without").due_s
    print(f"uniform restart: {slow_s:.3f} s a step, emulated {restarted.due_s:.3f} s: "
          f"{gain:.2f} times as long; overrun {restarted.overrun:.0%}")  # fmt: skip
    for entry in watched.entries():
        print(f"{entry.at:.2f} {entry.generation} {entry.phase}: {entry.why}")
    sizes = [len(e.ranks) for e in watched.entries() if e.phase == "entering"]
    assert sizes[0] == 4
    assert 3 in sizes
    assert sizes[-1] == 4
    assert gain > 1.5


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_slow_chip_is_found_and_given_less(tmp_path: Path) -> None:
    write(tmp_path)
    drill = {"fault": "slow", "chip": "fast/0/1", "step": 24, "factor": 1.5}
    job = job_of(tmp_path, "run", elastic={"drill": [drill]})
    watched = Watched(job.config.folder)
    entries = run_beside(job, watched, [
        lambda: watched.until(lambda: len(watched.records()) > 12),
        lambda: watched.steps("before"),
        lambda: watched.until(lambda: len(watched.records()) > 25),
        lambda: watched.steps("slow", 4),
        lambda: watched.decided("replanned", "stays", after=4),
        lambda: watched.until(lambda: watched.entries()[-1].phase == "running"),
        lambda: watched.steps("shifted"),
    ])  # fmt: skip
    for entry in entries:
        print(f"{entry.at:.2f} {entry.generation} {entry.phase} step {entry.step}: {entry.why}")
    figures = {name: watched.step_s(name) for name in watched.marks}
    print(figures)
    found = [entry for entry in entries if entry.phase == "slow"]
    assert [entry.why.split("(")[1].split(")")[0] for entry in found] == ["fast/0/1"]
    assert found[0].step is not None
    assert found[0].step - 24 <= 10
    assert figures["shifted"] < figures["slow"]
    store = SeriesStore(watched.folder / SERIES / "slow.sqlite", read_only=True)
    (series,) = store.read("tutti_slow_chip_ratio", 0, 1 << 40)
    store.close_reading()
    assert series.name == key("slow_chip_ratio", "fast/0/1")
    lines = (watched.folder / EVENTS).read_text(encoding="utf-8").splitlines()
    assert "slow-chip" in {json.loads(line)["name"] for line in lines}
