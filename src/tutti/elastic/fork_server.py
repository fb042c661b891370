"""A process that has imported what ranks need and touched no device; ranks are forked from it.

A rank's imports take seconds; a fork takes some hundredths. The server is one thread and opens no
device, so that its children may. It is asked over a socket, in lines of JSON, and tells when a
child ended and how. It dies with whoever started it, and the ranks with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_MOST_BYTES = 1 << 20


class ForkServer:
    """The server, as its owner sees it."""

    def __init__(self, module: str, folder: Path, *, log: Path) -> None:
        """Start it; it forks as soon as `module`, whose `main` ranks run, is warm for a run."""
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, module, str(folder), str(theirs.fileno())],
                pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip
        theirs.close()

    def fork(
        self, number: int, environment: Mapping[str, str], log: Path, pass_fds: Sequence[int]
    ) -> None:
        """Ask for a rank; the answer, its process id, comes by `messages` with this number."""
        asked = {"number": number, "environment": dict(environment), "log": str(log)}
        socket.send_fds(self.socket, [json.dumps(asked).encode()], list(pass_fds))

    def messages(self) -> list[dict[str, Any]]:
        """Return what it has said: {"number", "pid"} or {"pid", "status"}."""
        said = list[dict[str, Any]]()
        while select.select([self.socket], [], [], 0)[0]:
            data = self.socket.recv(_MOST_BYTES)
            if not data:
                raise EOFError("the fork server is gone")
            said.append(json.loads(data))
        return said

    def close(self) -> None:
        """End it, and every rank with it."""
        self.socket.close()
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def die_with_parent() -> None:
    """Let the kernel end this process when its parent ends."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)


def _serve(module: str, folder: Path, descriptor: int) -> None:
    die_with_parent()
    owner = socket.socket(fileno=descriptor)
    loaded = importlib.import_module(module)
    loaded.warm(folder)
    main = loaded.main
    ears, bell = os.pipe()
    os.set_blocking(bell, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(bell, warn_on_full_buffer=False)
    while True:
        ready = select.select([owner.fileno(), ears], [], [])[0]
        if ears in ready:
            os.read(ears, 4096)
            _reap(owner)
        if owner.fileno() in ready:
            data, descriptors, _, _ = socket.recv_fds(owner, _MOST_BYTES, 8)
            if not data:
                return
            asked = json.loads(data)
            child = os.fork()
            if child == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for own in (ears, bell):
                    os.close(own)
                owner.close()
                _be_rank(main, asked, descriptors)
            for own in descriptors:
                os.close(own)
            owner.send(json.dumps({"number": asked["number"], "pid": child}).encode())


def _reap(owner: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(OSError):
                owner.send(json.dumps({"pid": pid, "status": code}).encode())


def _be_rank(main: Any, asked: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Run as the child until it ends; never returns."""

    def rank() -> int:
        die_with_parent()
        os.setsid()
        out = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(out, stream)
        os.close(out)
        os.environ.update(asked["environment"])
        return int(main(descriptors))

    run_and_exit(rank)


def run_and_exit(body: Callable[[], int]) -> NoReturn:
    """Be a forked process: run `body`, end with its status, and nothing that its parent had."""
    status = 1
    try:
        status = body()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
