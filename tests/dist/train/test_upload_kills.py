"""Kill -9 in the middle of an upload: every checkpoint that the URL names is whole.

A server counts the bytes that come and ends the run at a chosen one; it keeps what a broken upload
sent, as a torn object. Then the run goes on, from its folder or from the URL alone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpointing import Run, run
from tests.support.nursery import Nursery
from tests.support.upload_victim import PLAN, log_of
from tutti.bench.storage.object_server import ObjectServer
from tutti.train.checkpoint import CheckpointSettings
from tutti.train.checkpoint.places import UrlFiles
from tutti.train.checkpoint.remote import INDEX, RemoteRun

ROOT = Path(__file__).parents[3]
STEPS, SLOW_STEPS = 2, 4
KILLS = 20
Undisturbed = tuple[int, dict[int, float]]
"""The bytes that a whole run sends, and its losses."""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    found = Nursery("tests.support.upload_victim")
    yield found
    found.close()


def losses(folder: Path) -> dict[int, float]:
    return dict(json.loads(line) for line in log_of(folder).read_text().splitlines())


def undisturbed(nursery: Nursery, base: Path, steps: int) -> Undisturbed:
    """Let a run come to its end."""
    (base / "store").mkdir(parents=True)
    with ObjectServer(base / "store") as server:
        nursery.ask(str(base / "run"), server.url, steps)
        assert nursery.answer() == 0
        return server.received, losses(base / "run")


def assert_named_are_whole(url: str, folder: Path) -> list[int]:
    """Load every checkpoint that the URL names; return their steps."""
    remote = RemoteRun(url)
    found = remote.newest_first()

    def load(one: Run) -> None:
        for checkpoint in found:
            assert UrlFiles(remote, checkpoint).damage() is None
            progress = one.checkpointer.load(one.engine, checkpoint.step)
            assert progress.step == checkpoint.step

    run(PLAN, folder, load, settings=CheckpointSettings(asynchronous=False, to=url))
    return sorted(checkpoint.step for checkpoint in found)


def kill_and_go_on(nursery: Nursery, base: Path, expected: dict[int, float], kill_at: int) -> None:
    """End a run when the server has heard so many bytes, look, and let it go on to its end."""
    folder, store = base / "run", base / "store"
    store.mkdir(parents=True)
    victim: list[int] = []
    early: list[str] = []
    begun = threading.Event()

    def heard(name: str, total: int) -> None:
        if total >= kill_at and not early:
            early.append(name)
            begun.wait()  # the run began before its id was told
            os.kill(victim[0], signal.SIGKILL)

    with ObjectServer(store, heard=heard) as server:
        steps = max(expected)
        victim.append(nursery.ask(str(folder), server.url, steps))
        begun.set()
        assert nursery.answer() == -signal.SIGKILL
        server.heard = lambda _name, _total: None
        index = store / INDEX
        before = index.read_bytes() if index.exists() else b""
        named = assert_named_are_whole(server.url, base / "empty")
        made = losses(folder)
        assert all(step <= max(made) for step in named)
        if index.exists():  # what was loaded by its step counts as newest there: as before, then
            index.write_bytes(before)
        if kill_at % 2:
            shutil.rmtree(folder)  # the disk went with the node: only the URL is left
        nursery.ask(str(folder), server.url, steps)
        assert nursery.answer() == 0
        assert losses(folder) == expected
        assert assert_named_are_whole(server.url, base / "empty") == [steps - 1, steps]


def moments(count: int, whole: int) -> list[int]:
    """Bytes at which runs are killed: spread over a whole run, odd and even in turn."""
    found = [whole * (2 * number + 1) // (2 * count) for number in range(count)]
    return [moment // 2 * 2 + number % 2 for number, moment in enumerate(found)]


def kill_often(nursery: Nursery, folder: Path, count: int, steps: int) -> None:
    whole, expected = undisturbed(nursery, folder / "undisturbed", steps)
    for number, kill_at in enumerate(moments(count, whole)):
        kill_and_go_on(nursery, folder / str(number), expected, kill_at)


@pytest.mark.slow  # test_checkpoint_kills asks it of a disk
def test_killed_in_the_middle_of_an_upload(nursery: Nursery, tmp_path: Path) -> None:
    kill_often(nursery, tmp_path, 3, STEPS)


@pytest.mark.slow
def test_killed_twenty_times(nursery: Nursery, tmp_path: Path) -> None:
    kill_often(nursery, tmp_path, KILLS, SLOW_STEPS)
