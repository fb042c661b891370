"""Python commands as forks of a process that has imported torch and the engine already.

`python -m MODULE …`, `python FILE …` and `tutti …` import for two to four seconds of a core before
they do anything; a fork takes some hundredths. `WarmPopen` takes the place of `subprocess.Popen` in
a test session and in all that is forked for it: a real process, with the number, session, folder,
environment, descriptors, words, signals and exit status that were asked for. What a fork cannot
take over is started as ever: another interpreter or network, variables that Python reads when it
begins, another tutti on the path. So is everything below `REAL_START`, which a few tests ask for.
"""

from __future__ import annotations

import array
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SERVER = "tests.support.warm_server"
REAL_START = "TUTTI_TESTS_REAL_START"  # a variable: nothing below is a fork
READ_EARLY = ("PYTHON", "NUMBA_", "LD_", "LC_", "LANG", "TORCH_", "HF_")
SWITCHES = {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"}  # a fork heeds them
MOST_BYTES = 1 << 20
_TUTTI = str(Path(sys.executable).with_name("tutti"))
_POPEN = subprocess.Popen
_KILLED = int(signal.SIGKILL)  # how a process ends with its server


def _network() -> str:
    return os.readlink("/proc/thread-self/ns/net") if sys.platform == "linux" else ""


class Asker:
    """This process's line to the process that forks, which the first one that asks starts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line: socket.socket | None = None
        self._owner = 0
        self._servers: list[subprocess.Popen[bytes]] = []  # they end with this process
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.address = ""  # of the server; a fork is born with it
        self.environment: Mapping[str, str] = dict(os.environ)  # that the server began with
        self.user, self.network = os.geteuid(), _network()

    def begin(self) -> None:
        """Start the server, so that its address is known."""
        self.ask({"began": True})

    def ask(self, asked: Mapping[str, Any], descriptors: Sequence[int] = ()) -> str:
        with self._lock:
            if self._line is None or self._owner != os.getpid():
                self._line, self._owner = self._connected(), os.getpid()
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            self._line.sendmsg([json.dumps(asked).encode()], ancillary if descriptors else [])
            return self._line.recv(MOST_BYTES).decode()

    def _connected(self) -> socket.socket:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if self.address:
            line.connect(self.address)
            return line
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        self.address = f"{self._folder.name}/line"
        line.bind(self.address)
        line.listen(64)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        passed = (line.fileno(), theirs.fileno())
        with line, theirs:
            server = _POPEN(
                # the spaces are where a fork writes its own words
                [sys.executable, "-m", SERVER, *map(str, passed), self.address, " " * 4096],
                pass_fds=passed, stdin=subprocess.DEVNULL, env=self.environment, cwd=ROOT,
                start_new_session=True,
            )  # fmt: skip
        self._servers.append(server)
        return ours


ASKER = Asker()


class WarmPopen(subprocess.Popen):  # type: ignore[type-arg]
    """A process as `subprocess.Popen` gives it; a fork where it can be one."""

    _status: int | None = None

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any,
        cwd: Any, env: Any, startupinfo: Any, creationflags: int, shell: bool, p2cread: int,
        p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int,
        restore_signals: bool, gid: Any, gids: Any, uid: Any, umask: int, start_new_session: bool,
        process_group: int,
    ) -> None:  # fmt: skip
        """Start it: the one step of `subprocess` that is another."""
        environment = dict(os.environ) if env is None else {str(k): str(v) for k, v in env.items()}
        plain = (
            executable is preexec_fn is gid is gids is uid is None
            and not shell and close_fds and umask == -1 and process_group in (-1, 0)
            and not isinstance(args, (str, bytes, os.PathLike))
        )  # fmt: skip
        words = list(map(os.fspath, args)) if plain else []
        folder = os.path.abspath(os.fspath(cwd or "."))
        if not plain or not is_warm(words, environment, folder):
            super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
                creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
                restore_signals, gid, gids, uid, umask, start_new_session, process_group,
            )  # fmt: skip
            return
        streams = [own if own >= 0 else i for i, own in enumerate((p2cread, c2pwrite, errwrite))]
        self._status, theirs = os.pipe()
        try:
            asked = request(words, environment, folder, [0, 1, 2, *pass_fds])
            asked |= {"new_session": start_new_session, "new_group": process_group == 0}
            self.pid = int(ASKER.ask(asked, [theirs, *streams, *pass_fds]))
            self._child_created = True
        finally:
            os.close(theirs)
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _internal_poll(self, *words: Any, **named: Any) -> int | None:
        if self._status is None:
            return super()._internal_poll(*words, **named)
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._status is None:
            return super()._try_wait(wait_flags)
        if self.returncode is not None:
            return self.pid, 0
        ready, _, _ = select.select([self._status], [], [], 0 if wait_flags else None)
        if not ready:
            return 0, 0
        told = os.read(self._status, 64)
        os.close(self._status)
        return self.pid, int(told) if told else _KILLED


def request(
    words: list[str], environment: Mapping[str, str], folder: str, numbers: list[int]
) -> dict[str, Any]:
    """Return what a fork is asked for."""
    return {
        "words": words,
        "environment": environment,
        "folder": folder,
        "numbers": numbers,
        "affinity": sorted(os.sched_getaffinity(0)),
        "asker": os.getpid(),
    }


def started_by(pid: int) -> list[int]:
    """Return the processes that a process started, forks or not, in the order of their start."""
    import psutil

    asked = ASKER.ask({"started_by": pid}) if ASKER.address else ""
    return sorted(
        {*map(int, asked.split()), *(each.pid for each in psutil.Process(pid).children())}
    )


def is_warm(words: list[str], environment: Mapping[str, str], folder: str) -> bool:
    """Whether a fork is what the command would be."""
    if REAL_START in environment or not os.path.isdir(folder):
        return False
    script = words[:1] == [_TUTTI]
    module = words[:1] == [sys.executable] and words[1:2] == ["-m"] and len(words) > 2
    file = words[:1] == [sys.executable] and words[1:2] and words[1].endswith(".py")
    if not (script or module or (file and os.path.isfile(os.path.join(folder, words[1])))):
        return False
    began = ASKER.environment
    for name in began.keys() | environment.keys():
        early = name.startswith(READ_EARLY) and name not in SWITCHES
        if early and began.get(name) != environment.get(name):
            return False
    if (os.geteuid(), _network()) != (ASKER.user, ASKER.network):
        return False
    return not any(map(_shadows, set(folders(environment)) - set(folders(began))))


def folders(environment: Mapping[str, str]) -> list[str]:
    """Return what PYTHONPATH names."""
    return [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]


def _shadows(folder: str) -> bool:
    """Whether modules of a folder may stand for some that are imported already."""
    if Path(folder) in (ROOT, ROOT / "src"):
        return False
    return any(Path(folder).glob("tutti*")) or any(Path(folder).glob("*customize.py"))


# --- shells ----------------------------------------------------------------------------------


def path_of_shells() -> str:
    """Return a PATH on which `tutti` is one that asks for a fork, for what shells run."""
    real = [str(Path(_TUTTI).parent), os.environ["PATH"]]
    if sys.platform != "linux":
        return os.pathsep.join(real)
    ASKER.begin()
    folder = Path(ASKER.address).parent
    command = folder / "tutti"
    if not command.exists():
        words = [sys.executable, "-I", "-S", str(Path(__file__)), ASKER.address]
        made = folder / "made"
        made.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
        made.chmod(0o755)
        made.rename(command)
    return os.pathsep.join([str(folder), *real])


def be_tutti(address: str, arguments: list[str]) -> int:
    """Stand for a fork that does what `tutti` was asked: hand signals on, end as it ends."""
    ASKER.address = address
    began = json.loads(ASKER.ask({"began": True}))
    ASKER.environment, ASKER.user, ASKER.network = (
        began["environment"], began["user"], began["network"],
    )  # fmt: skip
    words = [_TUTTI, *arguments]
    if not is_warm(words, os.environ, os.getcwd()):
        os.execv(_TUTTI, words)
    process = WarmPopen(words, stdin=0, stdout=1, stderr=2)
    ASKER.ask({"die_with": os.getpid(), "pid": process.pid})
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: process.send_signal(number))
    code = process.wait()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def install() -> None:
    """Let every process that this one starts be a fork where it can be."""
    subprocess.Popen = WarmPopen  # type: ignore[misc]


if __name__ == "__main__":
    sys.exit(be_tutti(sys.argv[1], sys.argv[2:]))
