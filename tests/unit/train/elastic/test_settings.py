"""`elastic:` in a training file: what is refused, in one line each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.train_job import write_job
from tutti.errors import InputError
from tutti.train.elastic.job import check_elastic
from tutti.train.run.config import TrainConfig, with_changes
from tutti.train.run.planning import Job, prepare


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"))


def job(folder: Path, **changes: Any) -> Job:
    return prepare(with_changes(TrainConfig.load(folder / "train.yaml"), changes))


def test_death_needs_two_heartbeats(folder: Path) -> None:
    with pytest.raises(InputError, match=r"'death_after_s' is 0\.3, but a heartbeat"):
        job(folder, elastic={"death_after_s": 0.3})


def test_more_chips_than_the_cluster_has(folder: Path) -> None:
    with pytest.raises(InputError, match=r"elastic.min_chips is 99, but cluster 'laptop' has \d+"):
        check_elastic(job(folder, elastic={"min_chips": 99}))


def test_figures_that_nobody_would_write(folder: Path) -> None:
    with pytest.raises(InputError, match=r"measure.tensorboard: not written by elastic runs yet"):
        check_elastic(job(folder, elastic={}, **{"measure.tensorboard": True}))


def test_an_unknown_key_and_an_unknown_fault_are_named(folder: Path) -> None:
    with pytest.raises(InputError, match="unknown key 'copy'; did you mean 'copies'"):
        job(folder, elastic={"copy": 1})
    with pytest.raises(InputError, match="kill"):
        job(folder, elastic={"drill": [{"fault": "kil"}]})
