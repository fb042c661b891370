"""One job at a time in a folder; a job that is killed holds nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tutti.errors import InputError
from tutti.train.run.claim import LOCK, Home, claim

HOLD = """
import sys, time
from pathlib import Path
from tutti.train.run.claim import claim
held = claim(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_a_second_job_is_refused_until_the_first_lets_go(tmp_path: Path) -> None:
    held = claim(tmp_path / "a" / "run")
    with pytest.raises(InputError) as refused:
        claim(tmp_path / "a" / "run", wait_s=0.0)
    said = str(refused.value)
    assert f"another job writes there now (process {os.getpid()} of " in said
    assert "name another --output" in said
    claim(tmp_path / "b", wait_s=0.0).release()
    held.release()
    claim(tmp_path / "a" / "run", wait_s=0.0).release()


def test_a_job_that_is_killed_holds_nothing(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=f"process {other.pid} of"):
            claim(tmp_path, wait_s=0.0)
        other.send_signal(signal.SIGKILL)
        other.wait(60)
        claim(tmp_path, wait_s=0.0).release()


def test_who_inherits_it_holds_it_too(tmp_path: Path) -> None:
    held = claim(tmp_path)
    command = [sys.executable, "-S", "-c", "print('here', flush=True); input()"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(held.descriptor,)
    ) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        held.release()
        with pytest.raises(InputError, match="another job writes there now"):
            claim(tmp_path, wait_s=0.0)
        rank.communicate(b"\n", timeout=60)
    claim(tmp_path, wait_s=0.0).release()


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    held = claim(tmp_path)
    assert "its file system has no locks" in held.note
    held.release()


def test_a_folder_is_at_home_until_it_goes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    held = claim(folder)
    home = Home(folder)
    (folder / "checkpoints").mkdir()
    assert home.lost() == ""
    folder.rename(tmp_path / "old")
    assert home.lost() == f"was moved to {tmp_path}/old"
    assert home.lost() == "", "said once"
    with pytest.raises(InputError, match="another job writes there now"):
        claim(folder, wait_s=0.0)  # the new one is held, too
    shutil.rmtree(folder)
    assert home.lost() == "was deleted"
    (folder / LOCK).unlink()
    assert home.lost() == ""
    with pytest.raises(InputError, match="another job writes there now"):
        claim(folder, wait_s=0.0)
    home.close()
    claim(folder, wait_s=0.0).release()
    held.release()


def test_a_name_that_another_job_has_taken_is_left_to_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    held, home = claim(folder), Home(folder)
    folder.rename(tmp_path / "old")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=f"process {other.pid} of"):
            home.lost()
        other.kill()
    home.close()
    held.release()
