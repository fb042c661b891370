"""What is looked at before a run begins whose checkpoints go to a URL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.any_plan import FOUR, PLAIN, Draft, level
from tests.support.checkpointing import Run, run
from tutti.document import Place, build
from tutti.errors import InputError
from tutti.storage import url as urls
from tutti.storage.url import RemoteFolder
from tutti.train.checkpoint import CheckpointSettings
from tutti.train.checkpoint.remote import RemoteRun
from tutti.train.run.config import TrainConfig
from tutti.train.run.starting import (
    check_sources,
    clear_run,
    find_manifest,
    has_checkpoints,
    require_fresh_url,
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: Any) -> None:
    monkeypatch.setattr(urls, "_PAUSE_S", 0.001)


def config_of(folder: Path, url: str) -> TrainConfig:
    return build(
        TrainConfig,
        {
            "model": "smollm2-135m",
            "data": {"train": [{"kind": "synthetic"}]},
            "checkpoints": {"to": url},
            "output": str(folder),
        },
        Place("test"),
    )


def save(folder: Path, url: str) -> None:
    def work(one: Run) -> None:
        one.begin()
        one.train(1)
        one.save()

    plan = Draft().line((FOUR, [{"count": 1}])).plan(PLAIN, level(1))
    run(plan, folder, work, settings=CheckpointSettings(asynchronous=False, to=url))


def test_a_run_is_found_by_its_url_alone(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    config = config_of(tmp_path / "new", url)
    assert not has_checkpoints(config)
    require_fresh_url(url)
    with pytest.raises(InputError, match="no complete checkpoint"):
        find_manifest(config, True)
    save(tmp_path / "old", url)
    assert has_checkpoints(config)
    place, manifest = find_manifest(config, True)
    assert place.startswith(f"{url}/step-000001.")
    assert manifest.progress.step == 1
    with pytest.raises(InputError, match="holds 1 checkpoint of an earlier run"):
        require_fresh_url(url)
    clear_run(tmp_path / "new", url)
    assert RemoteRun(url).newest_first() == []
    require_fresh_url(url)


def test_a_url_that_cannot_be_written_to_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: Any
) -> None:
    def refused(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(RemoteFolder, "_onto_disk", refused)
    config = config_of(tmp_path / "new", f"file://{tmp_path}/store")
    with pytest.raises(InputError, match=r"cannot be written to .*Read-only file system"):
        check_sources(config, False)


def test_a_path_is_no_url(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="write a URL, such as s3://bucket/run"):
        config_of(tmp_path, "/mnt/run")
