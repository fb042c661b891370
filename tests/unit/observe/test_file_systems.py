"""File systems of a run: room, latency, one that hangs, one that cannot be written."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from tutti.observe.figures import key
from tutti.observe.samplers import file_systems
from tutti.observe.samplers.file_systems import FileSystemSampler, mount_of

PATIENT_S = 60.0


def test_room_and_latency_of_the_file_system_of_a_run(tmp_path: Path) -> None:
    sampler = FileSystemSampler([tmp_path, tmp_path / "not" / "yet"], "a-0")
    values = sampler.ask()
    mount = mount_of(tmp_path)
    own = os.statvfs(tmp_path)
    assert os.path.ismount(mount)
    assert tmp_path.is_relative_to(mount)
    assert values[key("file_system_free_bytes", mount)] == pytest.approx(
        own.f_bavail * own.f_frsize, rel=0.2
    )
    assert 0 < values[key("file_system_free_ratio", mount)] <= 1
    assert 0 < values[key("file_system_write_seconds", mount)] < PATIENT_S
    assert 0 < values[key("file_system_read_seconds", mount)] < PATIENT_S
    assert {name.partition("{")[2] for name in values} == {f'mount="{mount}"}}'}
    assert not list(tmp_path.iterdir())  # nothing stays


def test_one_that_hangs_is_seen_by_how_long_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = FileSystemSampler([tmp_path], "a-0", every_s=0.01)
    at = key("file_system_write_seconds", mount_of(tmp_path))
    end = time.monotonic() + PATIENT_S
    while at not in sampler.sample():
        assert time.monotonic() < end
        time.sleep(0.01)
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(_: int) -> None:
        hangs.set()
        goes_on.wait(PATIENT_S)

    monkeypatch.setattr(file_systems.os, "fsync", hang)
    assert hangs.wait(PATIENT_S)
    before = sampler.sample()[at]
    time.sleep(0.05)
    assert sampler.sample()[at] >= max(0.05, before)
    goes_on.set()
    sampler.close()


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    gone = tmp_path / "gone"
    sampler = FileSystemSampler([gone], "a-0", said.append)
    for _ in range(2):
        values = sampler.ask()
        assert key("file_system_free_bytes", mount_of(tmp_path)) in values
        assert key("file_system_write_seconds", mount_of(tmp_path)) not in values
    assert said == [f"{gone}: no latency of its file system (No such file or directory)"]
