"""What a run's folder looks like after every kind of ending, and what may be deleted."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plans import small_model
from tutti.errors import InputError
from tutti.plan.job import PRECISIONS
from tutti.train.checkpoint import folders
from tutti.train.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    Progress,
    RandomState,
    SavedFile,
    check_model,
    damage,
    manifest_text,
    model_document,
    read_manifest,
)

MODEL = small_model(2)
SAVED = Manifest(
    progress=Progress(step=3, samples=9, loss_scale={"scale": 65536.0}, data={"at": [1, 2]}),
    updates=2,
    serial=1,
    saved_at=1.5e9,
    model_hash=MODEL.fingerprint,
    model=model_document(MODEL),
    plan_hash="0" * 12,
    world_size=2,
    precision=PRECISIONS["bf16"],
    optimizer="adamw",
    version="0.1.0",
    torch_version="2.13.0",
    random=RandomState(device="cpu", state="00ff"),
    files={"numbers": SavedFile(num_bytes=5)},
)


def write(path: Path, serial: int = 1) -> Path:
    path.mkdir(parents=True)
    (path / "numbers").write_text("12345")
    (path / MANIFEST).write_text(manifest_text(replace(SAVED, serial=serial)))
    return path


def published(folder: Path, step: int) -> Path:
    partial = folders.begin(folder, step)
    shutil.rmtree(partial)
    write(partial, folders.next_serial(folder))
    return folders.publish(partial)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_manifest_comes_back(tmp_path):
    assert read_manifest(write(tmp_path / "step-000003")) == SAVED


def test_the_last_one_saved_is_the_latest_even_if_its_step_is_lower(tmp_path):
    assert folders.find_latest(tmp_path) is None
    assert folders.find_latest(tmp_path / "missing") is None
    for step in (100, 200, 150):
        published(tmp_path, step)
    assert folders.find_latest(tmp_path).name == "step-000150"
    assert (tmp_path / "latest").read_text() == "step-000150\n"
    assert names(tmp_path) == ["latest", "step-000100", "step-000150", "step-000200"]


def test_a_step_that_comes_again_replaces_itself(tmp_path):
    first = published(tmp_path, 7)
    (first / "numbers").write_text("54321")
    again = published(tmp_path, 7)
    assert (again / "numbers").read_text() == "12345"
    assert names(tmp_path) == ["latest", "step-000007"]


def test_what_is_half_written_or_half_deleted_is_not_found_and_goes(tmp_path):
    published(tmp_path, 1)
    write(tmp_path / "step-000002.partial", 9)
    write(tmp_path / "step-000003.removed", 9)
    write(tmp_path / "mine.partial", 9)
    assert folders.find_latest(tmp_path).name == "step-000001"
    said: list[str] = []
    folders.tidy(tmp_path, said.append)
    assert names(tmp_path) == ["latest", "mine.partial", "step-000001"]
    assert said == ["checkpoint step-000002 was not finished: removed"]


def test_who_sleeps_before_the_rename_publishes_nothing_once_a_later_process_has_begun(tmp_path):
    published(tmp_path, 7)
    sleeper = folders.begin(tmp_path, 7)
    write(sleeper / "in", 9)
    folders.tidy(tmp_path)
    other = folders.begin(tmp_path, 7)
    assert other.name != sleeper.name  # what the sleeper still writes is not in it
    with pytest.raises(InputError, match="was put away by a later process"):
        folders.publish(sleeper)
    assert names(tmp_path) == ["latest", "step-000007", other.name]
    assert folders.find_latest(tmp_path).name == "step-000007"


def test_who_is_quicker_than_the_one_that_puts_away_has_published(tmp_path, monkeypatch):
    partial = folders.begin(tmp_path, 3)
    shutil.rmtree(partial)
    write(partial)
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path == partial and target.name.endswith(".removed"):
            folders.publish(partial)
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    folders.tidy(tmp_path)
    assert names(tmp_path) == ["latest", "step-000003"]


def test_a_replaced_one_is_put_back_if_its_successor_never_came(tmp_path):
    published(tmp_path, 1)
    (tmp_path / "step-000001").rename(tmp_path / "step-000001.old")
    assert folders.find_latest(tmp_path).name == "step-000001.old"
    folders.tidy(tmp_path)
    assert names(tmp_path) == ["latest", "step-000001"]


def test_a_folder_that_lost_bytes_is_passed_over_with_a_line(tmp_path):
    published(tmp_path, 1)
    newer = published(tmp_path, 2)
    (newer / "numbers").write_text("123")
    said: list[str] = []
    assert folders.find_latest(tmp_path, said.append).name == "step-000001"
    assert said == [
        f"checkpoint step-000002 is not used: {newer / 'numbers'}: expected 5 bytes, found 3"
    ]
    (newer / MANIFEST).unlink()
    assert "no checkpoint of a training run" in str(damage(newer))


def test_which_one_a_person_means(tmp_path):
    with pytest.raises(InputError, match="holds no complete checkpoint"):
        folders.resolve(tmp_path, "latest")
    path = published(tmp_path, 5)
    assert folders.resolve(tmp_path, "latest") == [path]
    assert folders.resolve(tmp_path, "step-000005") == [path]
    assert folders.resolve(Path("elsewhere"), path) == [path]
    with pytest.raises(InputError, match="no such folder"):
        folders.resolve(tmp_path, "step-000006")


def test_retention_deletes_what_it_may(tmp_path):
    for step in range(10, 100, 10):
        published(tmp_path, step)
    gone = folders.retire(tmp_path, keep_last=2, keep_every=30)
    assert gone == ["step-000010", "step-000020", "step-000040", "step-000050", "step-000070"]
    assert [p.name for p in folders.complete_folders(tmp_path)] == [
        "step-000030",
        "step-000060",
        "step-000080",
        "step-000090",
    ]


@given(
    st.lists(st.integers(1, 50), unique=True, min_size=1),
    st.integers(-1, 5),
    st.none() | st.integers(1, 9),
)
def test_the_last_one_saved_never_goes(steps, keep_last, keep_every):
    saved = [(serial, step) for serial, step in enumerate(steps, 1)]
    gone = folders.superseded(saved, keep_last=keep_last, keep_every=keep_every)
    assert steps[-1] not in gone
    assert len(set(steps) - gone) >= min(len(steps), max(1, keep_last))
    assert not any(keep_every and step % keep_every == 0 for step in gone)


def test_another_model_is_refused_by_what_differs_first(tmp_path):
    path = write(tmp_path / "step-000003")
    check_model(path, SAVED, replace(MODEL, name="renamed"))
    with pytest.raises(InputError, match=r"'vocab' is 256 there and 300 here"):
        check_model(path, SAVED, replace(MODEL, vocab=300))
    with pytest.raises(InputError, match=r"'num_layers' is 2 there and 3 here"):
        check_model(path, SAVED, small_model(3))
    with pytest.raises(InputError, match=r"'blocks\[0\].attention.heads' is 8 there and 4 here"):
        check_model(path, SAVED, small_model(2, heads=4))
    with pytest.raises(InputError, match=r"'head.tied' is the default there and true here"):
        check_model(path, SAVED, small_model(2, tied=True))
