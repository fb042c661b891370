"""What the next generation is: when it begins with fewer chips, and what cannot be left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.train_job import write_job
from tutti.elastic.events import Settle, Settled, Unsettled
from tutti.elastic.membership import Membership
from tutti.train.elastic.next_generation import Settler
from tutti.train.run.config import TrainConfig, with_changes
from tutti.train.run.planning import prepare

BOTH = ("fast/0/0", "fast/0/1")


def settler(folder: Path, plan: str, **elastic: Any) -> Settler:
    config = TrainConfig.load(write_job(folder) / "train.yaml")
    given = {"plan": str(folder / plan), "output": str(folder / "run"), "elastic": elastic}
    (folder / "run").mkdir()
    return Settler(prepare(with_changes(config, given)), resume=False)


def test_the_first_generation_begins_with_all_chips_or_after_a_while_with_some(
    tmp_path: Path,
) -> None:
    found, members = settler(tmp_path, "larger.json"), Membership(job="job")
    answer = found(Settle(1, BOTH[:1], ()), members)
    assert isinstance(answer, Unsettled)
    assert "begins when all chips are there; not yet: fast/0/1" in answer.why
    answer = found(Settle(2, BOTH[:1], (), last=True), members)
    assert isinstance(answer, Settled)
    assert answer.ranks == BOTH[:1]
    assert answer.source.kind == "begin"


@pytest.mark.parametrize(("plan", "can"), [("larger.json", True), ("plan.json", False)])
def test_what_the_model_cannot_run_without_is_not_left(
    tmp_path: Path, plan: str, can: bool
) -> None:
    """Two replicas: one is enough. Two stages, no spare chip: both are needed."""
    found = settler(tmp_path, plan)
    assert found.can_do_without("fast/0/1", BOTH) is can
    assert not found.can_do_without("fast/0", BOTH)


def test_with_fewer_than_min_chips_what_is_left_saves_before_the_job_is_given_up(
    tmp_path: Path,
) -> None:
    found, members = settler(tmp_path, "larger.json", min_chips=2), Membership(job="job")
    assert isinstance(found(Settle(1, BOTH, ()), members), Settled)
    answer = found(Settle(2, BOTH[:1], ()), members)
    assert isinstance(answer, Unsettled)
    assert answer.why == "1 chip left, elastic.min_chips is 2"
    answer = found(Settle(3, BOTH[:1], (), last=True), members)
    assert isinstance(answer, Settled)
    assert found.closing == "1 chip left, elastic.min_chips is 2"
    assert isinstance(found(Settle(4, BOTH, ()), members), Settled)
    assert not found.closing  # it came back in time


def test_chips_that_the_model_cannot_run_on_save_nothing(tmp_path: Path) -> None:
    found = settler(tmp_path, "plan.json", min_chips=2)
    answer = found(Settle(1, BOTH[:1], (), last=True), Membership(job="job"))
    assert isinstance(answer, Unsettled)
    assert not found.closing
