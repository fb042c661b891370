"""The figures of an elastic run: each step once, whatever comes late, twice or is made again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.train_job import write_job
from tutti.observe.folder import METRICS
from tutti.observe.record import StepRecord
from tutti.train.elastic.figures import Figures
from tutti.train.run.config import TrainConfig, with_changes
from tutti.train.run.planning import prepare


class Run:
    """Figures of a run in a folder."""

    def __init__(self, folder: Path) -> None:
        config = TrainConfig.load(write_job(folder) / "train.yaml")
        self.folder = folder / "run"
        self.folder.mkdir()
        given = {"output": str(self.folder), "plan": str(folder / "plan.json")}
        self.figures = Figures(prepare(with_changes(config, given)), lambda text: None)

    def take(self, step: int, generation: int, *, late: bool = False, loss: float = 1.0) -> bool:
        record = StepRecord(
            step=step, loss=loss, balance=0.0, gradient_norm=1.0, learning_rate=1.0, tokens=1,
            seconds=1.0, tokens_per_s=1.0, mfu=0.1, hfu=0.1, predicted_s=1.0, skipped=False,
        )  # fmt: skip
        values: dict[str, Any] = {**record.to_document(), "generation": generation}
        return self.figures.take({**values, "late": True} if late else values)

    def steps(self) -> list[tuple[int, float]]:
        lines = (self.folder / METRICS).read_text(encoding="utf-8").splitlines()
        return [(json.loads(line)["step"], json.loads(line)["loss"]) for line in lines]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.figures.close()


def test_what_one_rank_says_late_overtakes_what_another_says_in_time(run: Run) -> None:
    """Rank 1 tells its last steps before rank 0's line of an earlier one has come."""
    run.take(1, 1)
    for step in (2, 3, 4):
        run.take(step, 1, late=True)
    run.take(2, 1)
    for step in (2, 3, 4):
        assert not run.take(step, 1, late=True)
    run.take(5, 2)
    assert [step for step, _ in run.steps()] == [1, 2, 3, 4, 5]


def test_steps_that_are_made_again_take_the_place_of_those_before(run: Run) -> None:
    for step in (1, 2, 3, 4):
        run.take(step, 1)
    run.take(2, 2, loss=2.0)
    assert run.steps() == [(1, 1.0), (2, 2.0)]
    assert not run.take(4, 1, late=True)  # of what was undone
    run.take(3, 2, loss=2.0)
    assert run.steps() == [(1, 1.0), (2, 2.0), (3, 2.0)]


def test_late_steps_of_the_generation_before_stand_before_those_of_the_next(run: Run) -> None:
    run.take(1, 1)
    run.take(3, 2)
    assert run.take(2, 1, late=True)
    assert [step for step, _ in run.steps()] == [1, 2, 3]


def test_a_step_that_follows_looks_at_no_other(run: Run) -> None:
    """Else a run of many steps would spend its time on its own figures."""
    looks = list[int]()

    class Counted(dict[int, dict[str, Any]]):
        def __iter__(self) -> Iterator[int]:
            looks.append(len(self))
            return super().__iter__()

    run.figures._records = Counted()
    assert run.take(1, 1)
    looks.clear()
    for step in range(2, 6):
        assert run.take(step, 1)
    assert looks == []
    assert run.take(3, 2, loss=2.0)  # it went back
    assert looks
    assert run.steps() == [(1, 1.0), (2, 1.0), (3, 2.0)]
    looks.clear()
    assert run.take(4, 2)
    assert looks == []
