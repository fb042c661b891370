"""What a process asks of the kernel at this moment, in words: why it does not go on. Linux only."""

from __future__ import annotations

import os
import platform

_READ, _WRITE, _SYNC, _OPEN, _SLEEP = "reads", "writes", "flushes", "opens a file", "sleeps"
# by their numbers in the kernel's tables (arch/x86/entry/syscalls/syscall_64.tbl and
# include/uapi/asm-generic/unistd.h)
_CALLS = {
    "x86_64": {
        0: _READ, 17: _READ, 19: _READ, 1: _WRITE, 18: _WRITE, 20: _WRITE, 74: _SYNC, 75: _SYNC,
        2: _OPEN, 257: _OPEN, 35: _SLEEP, 230: _SLEEP,
    },
    "aarch64": {
        63: _READ, 65: _READ, 67: _READ, 64: _WRITE, 66: _WRITE, 68: _WRITE, 82: _SYNC, 83: _SYNC,
        56: _OPEN, 101: _SLEEP, 115: _SLEEP,
    },
}  # fmt: skip
_OF_A_FILE = (_READ, _WRITE, _SYNC)


def system_call(pid: int, machine: str = "") -> str:
    """Return what a process's main thread is in, such as "reads /data/3.jsonl"; empty: unknown.

    Empty, too, where it computes, waits for another thread, or may not be looked at.
    """
    try:
        with open(f"/proc/{pid}/syscall", encoding="ascii") as file:
            number, *arguments = file.read().split()
        call = _CALLS.get(machine or platform.machine(), {}).get(int(number), "")
        if call not in _OF_A_FILE:
            return call
        target = os.readlink(f"/proc/{pid}/fd/{int(arguments[0], 16)}")
    except (OSError, ValueError, IndexError):
        return ""
    return f"{call} {target}" if target.startswith("/") else ""  # no pipes, no sockets
