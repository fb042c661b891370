"""Network namespaces that live as long as this process: what test beds are made of.

Namespaces belong to sleeping processes that die with this one, so nothing is ever left behind, not
even after kill -9. Needs root; no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

from tutti.errors import InputError
from tutti.ranks.standing_processes import die_with_parent, enter_network, leave_network


def why_not() -> str | None:
    """Say in one line why no bed can be built here; None: it can."""
    if sys.platform != "linux":
        return "a test bed needs Linux (network namespaces)"
    if os.geteuid():
        return "a test bed needs root"
    for tool in ("ip", "tc", "nsenter"):
        if shutil.which(tool) is None:
            return f"a test bed needs the command '{tool}'"
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return None if not probe.returncode else "no network namespaces may be made here"


_NEW_NETWORK = 0x40000000


@contextlib.contextmanager
def visiting(holder: int) -> Iterator[None]:
    """Be in a process's network namespace for a while; sockets made there stay there."""
    with open("/proc/thread-self/ns/net", encoding="ascii") as home:
        enter_network(holder)
        try:
            yield
        finally:
            if ctypes.CDLL(None, use_errno=True).setns(home.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), "setns")


class Namespaces:
    """Namespaces that exist until `close`."""

    def __init__(self) -> None:
        self.holders: list[int] = []  # processes, one per namespace

    def hold(self) -> int:
        """Start a process that holds a network namespace open."""
        ready, done = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                die_with_parent()
                leave_network()
                os.write(done, b"!")
                os.closerange(0, 256)
                while True:
                    signal.pause()
            finally:
                os._exit(1)
        os.close(done)
        self.holders.append(pid)
        came = os.read(ready, 1)
        os.close(ready)
        if not came:
            raise InputError("no network namespace may be made here")
        return pid

    @staticmethod
    def inside(holder: int, command: list[str], lines: list[str]) -> str:
        """Run a command in a namespace, lines on its standard input; return what it prints."""
        done = subprocess.run(
            ["nsenter", f"--net=/proc/{holder}/ns/net", *command],
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise InputError(f"test bed: {command[0]}: {done.stderr.strip()}")
        return done.stdout

    def close(self) -> None:
        """Remove everything."""
        for pid in self.holders:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self.holders.clear()
