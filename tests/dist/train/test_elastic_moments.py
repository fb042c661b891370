"""Elastic runs that are hit at bad moments: two faults at once, in a recovery, a save, a copy."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist.train.test_elastic import Runs, kill, same
from tests.support.elastic_watching import Struck
from tests.support.train_job import write_job
from tutti.elastic.journal import read_journal
from tutti.errors import TuttiError
from tutti.train.checkpoint.folders import complete_folders

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 24
SLOW_DISK = """
import os, time
fsync = os.fsync
def slow(descriptor):
    time.sleep(0.5)
    fsync(descriptor)
os.fsync = slow
"""


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(write_job(tmp_path))


def test_two_faults_at_once(runs: Runs) -> None:
    """Both stages at once: their copies are older by a step at most."""
    plain = runs.run("plain", steps=8)
    drills = [kill(0, 4, 3), kill(1, 4, 3), kill(0, 6, 9), kill(1, 6, 2, "stop")]
    result = runs.run("elastic", steps=8, elastic={"copies": 1, "drill": drills})
    same(result, plain)
    assert len(runs.entered("elastic")) in (3, 4, 5)


def test_faults_during_recovery_and_while_switching(runs: Runs) -> None:
    plain = runs.run("plain", steps=STEPS)
    struck = Struck(runs.folder / "elastic", ["moving"] * 4)
    drills = [kill(n % 2, 4 + 5 * n, 5) for n in range(4)]
    result = runs.run("elastic", steps=STEPS, elastic={"copies": 1, "drill": drills})
    assert struck.end() == 4
    same(result, plain)
    phases = [e.phase for e in read_journal(runs.folder / "elastic")]
    assert phases[-1] == "finished"


def test_killed_while_saving_renaming_and_copying(runs: Runs) -> None:
    plain = runs.run("plain", steps=STEPS)
    struck = Struck(runs.folder / "elastic", ["saving", "copied"] * 3)
    result = runs.run(
        "elastic", steps=STEPS, elastic={"copies": 1}, **{"checkpoints.every": 1}
    )  # fmt: skip
    assert struck.end() == 6
    same(result, plain)
    folder = runs.folder / "elastic" / "checkpoints"
    assert complete_folders(folder)
    assert not list(folder.glob("*.partial"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that is full after a few megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system may be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_ends_no_run_before_its_last_save(runs: Runs, small_disk: Path) -> None:
    """Checkpoints do not fit; a rank that is lost comes from its copy, and all steps are made."""
    (runs.folder / "elastic").mkdir()
    (runs.folder / "elastic" / "checkpoints").symlink_to(small_disk)
    (small_disk / "filling").write_bytes(bytes(5 << 20))
    plain = runs.run("plain", steps=8)
    elastic = {"copies": 1, "drill": [kill(1, 5, 9)]}
    with pytest.raises(TuttiError, match=r"checkpoint of step 8 failed .*No space left on device"):
        runs.run("elastic", steps=8, elastic=elastic, **{"checkpoints.every": 2})
    lines = (runs.folder / "elastic" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert tuple(json.loads(line)["loss"] for line in lines) == plain.losses
    assert [source for _, source in runs.entered("elastic")] == ["begin", "memory"]


def test_a_slow_disk_is_no_hang(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a rank flushes takes half a second more; a save takes longer than `hang_after_s`."""
    plain = runs.run("plain", steps=8)
    (runs.folder / "slow").mkdir()
    (runs.folder / "slow" / "sitecustomize.py").write_text(SLOW_DISK, encoding="utf-8")
    paths = [str(runs.folder / "slow"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    elastic = {"copies": 1, "hang_after_s": 1.0, "drill": [kill(1, 5, 9)]}
    began = time.monotonic()
    result = runs.run("elastic", steps=8, elastic=elastic, **{"checkpoints.every": 2})
    assert time.monotonic() - began > 2.0
    same(result, plain)
    causes = [e.why for e in read_journal(runs.folder / "elastic") if e.phase == "leaving"]
    assert causes == ["rank 1 (fast/0/1) was killed by SIGKILL"]
