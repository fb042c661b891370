"""A disk is measured beyond the page cache; what goes wrong with it is one line, and cleaned up."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tutti.errors import InputError
from tutti.hardware.profile import Profile, StorageAction, StorageFigure
from tutti.hardware.storage import StorageTier
from tutti.storage import disk, disk_work
from tutti.storage.disk import DiskQuestion, measure_disk

MIB = 1 << 20


def _question(folder: Path, **changes: Any) -> DiskQuestion:
    small = {"num_bytes": MIB, "processes": 1, "small_operations": 4, "repeats": 1}
    return DiskQuestion(folder=folder, **{**small, **changes})


def test_every_action_is_measured_by_one_to_n_processes(tmp_path: Path) -> None:
    told: list[str] = []
    found = measure_disk(_question(tmp_path, processes=2), lambda what, *_: told.append(what))
    assert {(f.action, f.processes) for f in found} == {
        (StorageAction.CHECKSUM, 1),
        *((a, n) for a in StorageAction if a is not StorageAction.CHECKSUM for n in (1, 2)),
    }
    for figure in found:
        operations = figure.processes * figure.bytes / figure.seconds
        assert figure.bandwidth == pytest.approx(operations, rel=1e-6)
    assert len(told) == 11
    assert not list(tmp_path.iterdir())


def test_processes_are_doubled_up_to_the_most(tmp_path: Path) -> None:
    assert _question(tmp_path, processes=6).counts == [1, 2, 4, 6]
    assert _question(tmp_path, processes=1).counts == [1]


def test_a_page_in_memory_is_recognised(tmp_path: Path) -> None:
    """What was just written is cached, until it is on the disk and dropped."""
    work = disk_work.DiskWork(path=str(tmp_path / "file"), num_bytes=4 * MIB, count=1, start_at=0.0)
    disk_work.write_large(work)
    with (tmp_path / "file").open("rb") as stream:
        stream.read()
        assert disk_work._is_cached(stream.fileno(), work.num_bytes)
    assert disk_work.read_large(work).beyond_cache or not hasattr(disk_work.os, "O_DIRECT")


def test_a_profile_keeps_what_it_knew_of_other_tiers(tmp_path: Path) -> None:
    one = tuple(
        StorageFigure(
            tier=StorageTier.LOCAL_DISK, action=action, processes=n, bytes=4096, seconds=1e-3,
            bandwidth=4.096e6 * n,
        )
        for action in StorageAction
        for n in (1, 2)
    )  # fmt: skip
    two = tuple(replace(figure, tier=StorageTier.FILE_SYSTEM) for figure in one)
    profile = Profile(chip="CPU", date="2026-01-31", origin="test", launch_floor_s=0.0)
    profile = profile.with_storage(one).with_storage(two).with_storage(one)
    profile.save(tmp_path / "profile.json")
    again = Profile.load(tmp_path / "profile.json")
    assert again == profile
    assert again.is_measured
    assert len(again.storage) == len(one) + len(two)
    write = again.storage_figure(StorageTier.LOCAL_DISK, StorageAction.WRITE)
    assert write is not None
    assert write.processes == 2
    assert again.storage_figure(StorageTier.OBJECT_STORE, StorageAction.WRITE) is None


# --- storage that fails ----------------------------------------------------------------------


def _line(folder: Path, **changes: Any) -> str:
    with pytest.raises(InputError) as error:
        measure_disk(_question(folder, **changes))
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def test_a_folder_that_is_not_there_or_a_file(tmp_path: Path) -> None:
    assert "no such folder" in _line(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    assert "is a file" in _line(tmp_path / "file")


def test_too_little_room_is_said_with_the_numbers(tmp_path: Path, monkeypatch: Any) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=3 * MIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    said = _line(tmp_path, processes=4)
    assert "3.0 MiB are free" in said
    assert "4 files of 1.0 MiB need 4.0 MiB" in said


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "became full while it was measured"),
        (errno.EDQUOT, "became full"),
        (errno.EROFS, "cannot be written to"),
        (errno.ESTALE, "is it still mounted?"),
        (errno.EIO, "cannot be measured (Input/output error)"),
    ],
)
def test_storage_that_fails_on_the_way(
    tmp_path: Path, monkeypatch: Any, number: int, said: str
) -> None:
    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk, "_together", fails)
    assert said in _line(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_vanishes_while_it_is_measured(tmp_path: Path) -> None:
    """The real thing: the folder is removed between two measurements."""
    folder = tmp_path / "mount"
    folder.mkdir()

    def report(what: str, *_: float) -> None:
        if what.startswith("read,"):
            shutil.rmtree(folder)

    with pytest.raises(InputError, match="went away while it was measured"):
        measure_disk(_question(folder), report)


def test_a_read_only_folder(tmp_path: Path, monkeypatch: Any) -> None:
    def refused(**_: object) -> str:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(disk.tempfile, "mkdtemp", refused)
    assert "cannot be written to (Read-only file system)" in _line(tmp_path)
