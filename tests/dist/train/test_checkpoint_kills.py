"""Kill -9 at any moment, and a full disk: the last complete checkpoint always loads.

Some runs are killed at random moments and go on until they are through; others are killed at a
chosen change of the folder: while a file is written, just before a rename, half-way in a deletion.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.checkpoint_victim import PLAN, log_of
from tests.support.checkpointing import Run, kept, run
from tests.support.nursery import Nursery
from tutti.train.checkpoint import CheckpointSettings, find_latest
from tutti.train.checkpoint.manifest import read_manifest

STEPS = 12
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    found = Nursery("tests.support.checkpoint_victim")
    yield found
    found.close()


class Victims:
    """Both ranks of a run, as processes of their own."""

    def __init__(
        self, nursery: Nursery, folder: Path, *, steps: int = STEPS, event: int = 0
    ) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        self._nursery, self._logs = nursery, [log_of(folder, rank) for rank in range(2)]
        for log in self._logs:
            log.unlink(missing_ok=True)
        self._pids = nursery.ask(str(folder), self._store.port, "job", steps, event)

    def lines(self, rank: int = 0) -> list[dict[str, float]]:
        found = []
        log = self._logs[rank]
        for line in log.read_text().splitlines() if log.exists() else ():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return found

    def until_steps(self, count: int, timeout_s: float = 120.0) -> None:
        """Wait until rank 0 has made some steps."""
        until = time.monotonic() + timeout_s
        while len(self.losses) < count:
            assert time.monotonic() < until, self._logs[0].read_text()
            time.sleep(0.005)

    def until_over(self, rank: int) -> None:
        """Wait until a rank has ended; it is a zombie until its starter hears of all."""
        state = Path(f"/proc/{self._pids[rank]}/stat")
        while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)

    def kill(self, ranks: tuple[int, ...] = (0, 1)) -> None:
        """End ranks; nobody's id is free for another process before all are over."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGKILL)

    def wait(self) -> list[int]:
        """Return the exit statuses when both ranks are over."""
        return self._nursery.answer()

    @property
    def losses(self) -> dict[int, float]:
        return {int(line["step"]): line["loss"] for line in self.lines() if "step" in line}


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a run that nobody killed."""
    victims = Victims(nursery, tmp_path_factory.mktemp("undisturbed") / "run")
    assert victims.wait() == [0, 0], victims.lines()
    assert sorted(victims.losses) == list(range(1, STEPS + 1))
    return victims.losses


def assert_loads(folder: Path, atleast: int) -> int:
    """Load the latest into this process and return its step; none may have got lost."""
    latest = find_latest(folder)
    if latest is None:
        assert atleast == 0
        return 0
    step = read_manifest(latest).progress.step
    assert step >= atleast

    def load(one: Run) -> None:
        progress = one.checkpointer.load(one.engine)
        assert (progress.step, one.engine.step_number) == (step, step)
        assert all(torch.isfinite(value).all() for _, _, value in kept(one.engine))

    run(PLAN, folder, load)
    return step


def until_saved(folder: Path, last: int) -> None:
    """Wait for a checkpoint of a later step."""
    until = time.monotonic() + 120
    while not any(int(path.name[5:]) > last for path in folder.glob("step-" + "[0-9]" * 6)):
        assert time.monotonic() < until, "nothing is saved"
        time.sleep(0.005)


def go_on_until_killed(
    nursery: Nursery, folder: Path, chance: random.Random, last: int, *, saved: bool
) -> tuple[int, Victims]:
    victims = Victims(nursery, folder, steps=10_000)
    # a moment of a step that is chosen at random, however fast this machine is today
    began = time.monotonic()
    steps = chance.randrange(1, 4)
    victims.until_steps(steps)
    if saved:  # on a slow machine steps may be faster than saves
        until_saved(folder, last)
    assert victims.lines()[0]["first"] == last
    time.sleep(chance.uniform(0.0, (time.monotonic() - began) / steps))
    one_only = chance.random() < 0.5
    victims.kill((chance.randrange(2),) if one_only else (0, 1))
    time.sleep(chance.uniform(0.0, 0.2) if one_only else 0.0)
    victims.kill()
    victims.wait()
    return assert_loads(folder, last), victims


def check_random_kills(
    nursery: Nursery, folder: Path, expected: dict[int, float], *, kills: int, seed: int
) -> None:
    chance, last = random.Random(seed), 0
    for number in range(kills):
        saved = number % 2 == 1
        last, victims = go_on_until_killed(nursery, folder, chance, last, saved=saved)
        for step, loss in victims.losses.items():
            if step in expected:
                assert loss == expected[step], f"step {step} after a restart"
    print(f"{kills} kills at random moments, {last} steps saved")
    assert last >= kills // 2, "hardly anything was saved: the kills met nothing"
    victims = Victims(nursery, folder, steps=last + 2)
    assert victims.wait() == [0, 0]
    assert assert_loads(folder, last + 2) == last + 2


@pytest.mark.timeout(600)
def test_killed_at_random_moments(nursery, undisturbed, tmp_path):
    check_random_kills(nursery, tmp_path / "run", undisturbed, kills=2, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_at_twenty_random_moments(nursery, undisturbed, tmp_path):
    check_random_kills(nursery, tmp_path / "run", undisturbed, kills=20, seed=2)


@pytest.fixture(scope="module")
def three_steps(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps: the next save also deletes an old one."""
    folder = tmp_path_factory.mktemp("three") / "run"
    assert Victims(nursery, folder, steps=3).wait() == [0, 0]
    return folder


def check_kill_at_event(
    nursery: Nursery, folder: Path, expected: dict[int, float], event: int
) -> int | None:
    """Kill rank 0 before a change of the folder; return the step left, None if it was through."""
    victims = Victims(nursery, folder, steps=5, event=event)
    victims.until_over(0)
    victims.kill()
    died = victims.wait()[0] == -signal.SIGKILL
    left = assert_loads(folder, 3)
    again = Victims(nursery, folder, steps=6)
    assert again.wait() == [0, 0]
    assert again.lines()[0]["first"] == left
    assert again.losses == {step: expected[step] for step in range(left + 1, 7)}
    assert sorted(path.name for path in folder.iterdir()) == [
        "latest",
        "step-000005",
        "step-000006",
    ]
    return left if died else None


@pytest.mark.timeout(600)
@pytest.mark.parametrize("event", [20, 50])
def test_killed_at_a_change_of_the_folder(event, nursery, three_steps, undisturbed, tmp_path):
    shutil.copytree(three_steps, tmp_path / "run")
    assert check_kill_at_event(nursery, tmp_path / "run", undisturbed, event) is not None


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_at_every_other_change_of_the_folder(nursery, three_steps, undisturbed, tmp_path):
    left = []
    for event in itertools.count(1, 2):
        folder = tmp_path / f"run-{event}"
        shutil.copytree(three_steps, folder)
        step = check_kill_at_event(nursery, folder, undisturbed, event)
        if step is None:
            break
        left.append(step)
    print(f"{len(left)} kills at changes of the folder; steps left: {left}")
    assert len(left) >= 20
    assert set(left) >= {3, 4, 5}


# --- a full disk ---------------------------------------------------------------------------


def check_full_disk(folder: Path, limit: contextlib.AbstractContextManager[None]) -> None:
    """Save until it fails; training goes on, a line says so, and the last one loads."""

    def work(one: Run) -> list[str]:
        one.begin()
        one.train(1)
        one.save()
        expected = kept(one.engine)
        one.checkpointer.wait()
        one.links.all_reduce((0, 1), torch.zeros(1)).wait()
        if one.links.rank == 0:
            entered.enter_context(limit)
        one.links.all_reduce((0, 1), torch.zeros(1)).wait()
        one.train(1)
        one.save()
        one.checkpointer.close()
        one.train(1)
        one.links.all_reduce((0, 1), torch.zeros(1)).wait()
        if one.links.rank == 0:
            entered.close()
        one.checkpointer.load(one.engine)
        assert one.engine.step_number == 1
        for (key, _, value), (_, _, before) in zip(kept(one.engine), expected, strict=True):
            assert torch.equal(value, before), key
        one.train(1)
        one.save()
        one.checkpointer.close()
        return one.lines

    entered = contextlib.ExitStack()
    with entered:
        lines = run(PLAN, folder, work, settings=CheckpointSettings(keep_last=5))
    assert len(lines[0]) == 1
    assert lines[1] == []
    assert "checkpoint of step 2 failed" in lines[0][0]
    assert "the last one is step-000001" in lines[0][0]
    assert "No space left" in lines[0][0] or "too large" in lines[0][0]
    names = sorted(path.name for path in folder.iterdir() if path.name != "filler")
    assert names == ["latest", "step-000001", "step-000002"]
    latest = find_latest(folder)
    assert latest is not None
    assert latest.name == "step-000002"


@contextlib.contextmanager
def small_files(num_bytes: int) -> Iterator[None]:
    """Let no file grow beyond a size: what a quota does. Python ignores the signal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_files_that_may_not_grow(tmp_path):
    check_full_disk(tmp_path / "run", small_files(100_000))


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Leave 100 kB of a disk."""
    filler = folder / "filler"
    usage = os.statvfs(folder)
    with filler.open("wb") as stream:
        stream.write(b"x" * (usage.f_bavail * usage.f_frsize - 100_000))
    try:
        yield
    finally:
        filler.unlink()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("only root can mount a small disk; the limit on file sizes stands for it")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(small_disk):
    run_folder = small_disk / "run"
    check_full_disk(run_folder, filled(small_disk))
