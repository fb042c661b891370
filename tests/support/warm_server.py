"""The process that forks for `warm_commands`, and how a fork becomes the command asked for."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import multiprocessing.process
import os
import runpy
import select
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from tests.support import warm_commands
from tests.support.warm_commands import ASKER, MOST_BYTES, ROOT, folders
from tutti.hardware import library, profile

PRELOADED = (
    "torch", "torch.distributed", "torch.distributed.checkpoint", "numba", "numpy", "pydantic",
    "safetensors.torch", "scipy.optimize", "rich.console", "typer", "tests.support.faulty_rank",
    "tutti.cli.main", "tutti.comm", "tutti.huggingface.tokenizer", "tutti.ranks.local_processes",
    "tutti.ranks.rendezvous", "tutti.search.planner", "tutti.train.engine.engine",
    "tutti.train.run.rank", "tutti.train.run.worker", "tutti.train.sync.comm_links",
)  # fmt: skip
_ABOVE = 200  # descriptors of a fork are moved here before they take their numbers


class _Server:
    """Forks, and tells who asked how each fork ended."""

    def __init__(self, listener: int, owner: int) -> None:
        self.listener = socket.socket(fileno=listener)
        self.owner = socket.socket(fileno=owner)
        self.lines = {owner: self.owner}
        self.ears, self.bell = os.pipe()
        os.set_blocking(self.bell, False)
        self.statuses: dict[int, int] = {}  # a child's number → where its end is told
        self.started_by: dict[int, int] = {}  # a living child's number → who asked for it
        self.askers: dict[int, list[int]] = {}  # a process, as a descriptor → who dies with it

    def serve(self) -> None:
        """Fork until the first asker is gone."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.bell, warn_on_full_buffer=False)
        while True:
            heard = [self.ears, self.listener.fileno(), *self.lines, *self.askers]
            for ready in select.select(heard, [], [])[0]:
                if ready == self.ears:
                    os.read(self.ears, 4096)
                    self._reap()
                elif ready == self.listener.fileno():
                    line, _ = self.listener.accept()
                    self.lines[line.fileno()] = line
                elif ready in self.askers:
                    self._end(self.askers.pop(ready))
                    os.close(ready)
                elif not self._answer(self.lines[ready]):
                    if ready == self.owner.fileno():
                        return
                    self.lines.pop(ready).close()

    def _answer(self, line: socket.socket) -> bool:
        """Do what is asked on a line; whether it is still there."""
        try:
            data, descriptors, _, _ = socket.recv_fds(line, MOST_BYTES, 64)
        except ConnectionError:
            return False
        if not data:
            return False
        asked = json.loads(data)
        if "die_with" in asked:
            with contextlib.suppress(OSError):
                line.send(b"0")
            self._tie(asked["pid"], asked["die_with"])
            return True
        if "began" in asked:
            began = {"environment": dict(os.environ), "user": ASKER.user, "network": ASKER.network}
            line.send(json.dumps(began).encode())
            return True
        if "started_by" in asked:
            theirs = (str(own) for own, by in self.started_by.items() if by == asked["started_by"])
            line.send(" ".join(theirs).encode() or b" ")
            return True
        child = os.fork()
        if child == 0:
            self._leave(descriptors[0])
            _be(asked, descriptors[1:])
        status, *rest = descriptors
        self.statuses[child] = status
        self.started_by[child] = asked["asker"]
        for own in rest:
            os.close(own)
        with contextlib.suppress(OSError):
            line.send(str(child).encode())
        return True

    def _tie(self, pid: int, asker: int) -> None:
        try:
            self.askers[os.pidfd_open(asker)] = [pid]
        except ProcessLookupError:
            self._end([pid])

    def _end(self, pids: list[int]) -> None:
        for pid in pids:
            if pid in self.statuses:  # not reaped: the number is its
                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                told = self.statuses.pop(pid)
                del self.started_by[pid]
                with contextlib.suppress(OSError):
                    os.write(told, str(status).encode())
                os.close(told)

    def _leave(self, status: int) -> None:
        """Close, in a fork, what is the server's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for line in (self.listener, *self.lines.values()):
            line.close()
        for own in (self.ears, self.bell, status, *self.statuses.values(), *self.askers):
            os.close(own)


def _be(asked: Mapping[str, Any], descriptors: list[int]) -> NoReturn:
    """Be the command until it ends; never returns."""
    status = 1
    try:
        _become(asked, descriptors)
        status = _ended(asked["words"])
    finally:
        os._exit(status)


def _become(asked: Mapping[str, Any], descriptors: list[int]) -> None:
    import numpy
    import torch

    if asked["new_session"]:
        os.setsid()
    if asked["new_group"]:
        os.setpgid(0, 0)
    above = max(_ABOVE, *asked["numbers"]) + 1
    high = [os.dup2(own, above + i) for i, own in enumerate(descriptors)]
    for own in descriptors:
        os.close(own)
    for own, number in zip(high, asked["numbers"], strict=True):
        os.dup2(own, number)
        os.close(own)
    before = folders(os.environ)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    multiprocessing.process.ORIGINAL_DIR = asked["folder"]  # from where a spawned process sees FILE
    os.sched_setaffinity(0, asked["affinity"])
    _open_streams()
    _write_words(asked["words"])
    sys.path[:] = [*folders(os.environ), *(each for each in sys.path[1:] if each not in before)]
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(asked["affinity"])))
    numpy.random.seed()  # a process that imports it draws its own
    _stand_for_parent(asked["asker"])
    warm_commands.install()


def _open_streams() -> None:
    buffered = not os.environ.get("PYTHONUNBUFFERED")
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        raw = open(number, "wb", buffering=-1 if buffered else 0, closefd=False)  # noqa: SIM115
        at_once = name == "stderr" or raw.isatty()
        made = io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=at_once,
                                write_through=not buffered)  # fmt: skip
        made.mode = "w"
        setattr(sys, name, made)
        setattr(sys, f"__{name}__", made)
    sys.__stdin__ = sys.stdin


def _write_words(words: list[str]) -> None:
    """Let /proc tell the command's words in place of the server's."""
    numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(numbers[45]), int(numbers[46])
    text = b"\0".join(map(os.fsencode, words))[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def _stand_for_parent(asker: int) -> None:
    """Let who asked be the parent, for those that ask for it or want to die with it."""
    from tutti.elastic import fork_server
    from tutti.ranks import standing_processes

    own, handle = os.getpid(), -1
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(asker)
    real = os.getppid

    def parent() -> int:
        if os.getpid() != own:
            return real()
        gone = handle < 0 or select.select([handle], [], [], 0)[0]
        return 1 if gone else asker

    def die_with_parent() -> None:
        if os.getpid() == own:
            ASKER.ask({"die_with": asker, "pid": own})
        else:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)

    os.getppid = parent
    standing_processes.die_with_parent = fork_server.die_with_parent = die_with_parent


def _ended(words: list[str]) -> int:
    """Run the command as Python would; return its status."""
    status = 0
    try:
        _run(words)
    except SystemExit as ended:
        if ended.code is not None and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            status = 128 + signal.SIGINT
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()  # type: ignore[attr-defined]
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            try:
                stream.flush()
            except OSError:
                status = status or 120
    if status == 128 + signal.SIGINT and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        os.kill(os.getpid(), signal.SIGINT)
    return status & 0xFF


def _run(words: list[str]) -> None:
    if words[1:2] == ["-m"] and words[0] == sys.executable:
        module = words[2]
        sys.argv = ["-m", *words[3:]]
        sys.orig_argv = words
        sys.path.insert(0, os.getcwd())
        sys.modules.pop(module, None)  # `python -m` runs a module that nobody imported
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    file = words[0] if words[0] != sys.executable else words[1]
    sys.argv = [file, *words[1 if words[0] != sys.executable else 2 :]]
    sys.path.insert(0, str(Path(file).resolve().parent))
    runpy.run_path(file, run_name="__main__")


def main() -> None:
    listener, owner = int(sys.argv[1]), int(sys.argv[2])
    ASKER.address = sys.argv[3]
    for name in PRELOADED:
        importlib.import_module(name)
    library.shipped()  # what ships is read once, too
    profile.shipped_profiles()
    gc.collect()
    gc.freeze()
    _Server(listener, owner).serve()


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
