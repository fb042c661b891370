"""What a process is in, as its kernel says."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tutti.elastic.system_calls import system_call


def started(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments])


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import time; time.sleep(60)", "sleeps"),
        ("open(__import__('sys').argv[1]).read()", "opens a file"),
        ("f = open(__import__('sys').argv[1], 'r+b', 0); f.read(1)", "reads {path}"),
    ],
)
def test_what_a_process_waits_for(code: str, words: str, tmp_path: Path) -> None:
    if not os.path.exists("/proc/self/syscall"):
        pytest.skip("this kernel does not say in which call a process is")
    path = tmp_path / "fifo"
    os.mkfifo(path)
    process = started(code, str(path))
    try:
        until, found = time.monotonic() + 10, ""
        while found != words.format(path=path) and time.monotonic() < until:
            time.sleep(0.02)
            found = system_call(process.pid)
        assert found == words.format(path=path)
    finally:
        process.kill()
        process.wait()


def test_nothing_is_known_of_who_is_not_there() -> None:
    assert system_call(1 << 30) == ""
    assert system_call(os.getpid(), "sparc") == ""
