"""The kernel's own messages on this host, as lines of a log: /dev/kmsg, or what `dmesg` prints.

Each line gets the time of a calendar and the name of this host, as syslog would write it, so that
it can be put in order with the logs of ranks.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from tutti.errors import InputError

KERNEL = "kernel's ring"
KMSG = Path("/dev/kmsg")
_RECORD_BYTES = 8192  # the most that the kernel hands out at once
_RECORD = re.compile(rb"\d+,\d+,(\d+),[^;]*;(.*)", re.DOTALL)
_PRINTED = re.compile(rb"(?:<\d+>)?\[\s*(\d+)\.(\d{6})\] ?(.*)")
_LONGEST_S = 20


def kernel_lines(kmsg: Path = KMSG) -> bytes:
    """Return what the kernel's ring holds; who may not read it is told so in a line."""
    try:
        stamped = list(_of_records(_records(kmsg)))
    except OSError as error:
        stamped = list(_of_dmesg(f"{kmsg}: {error.strerror}"))
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    host = os.uname().nodename.encode()
    return b"".join(
        b"%s %s kernel: %s\n" % (_moment(booted + since_boot_s), host, text)
        for since_boot_s, text in stamped
    )


def _moment(seconds: float) -> bytes:
    return datetime.fromtimestamp(seconds, tz=UTC).isoformat(timespec="microseconds").encode()


def _records(kmsg: Path) -> Iterator[bytes]:
    """Yield one record per read, as the kernel hands them out, to the newest."""
    descriptor = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                record = os.read(descriptor, _RECORD_BYTES)
            except BlockingIOError:  # that was the newest
                return
            except BrokenPipeError:  # overwritten meanwhile: the next read goes on with the oldest
                continue
            if not record:
                return
            yield record
    finally:
        os.close(descriptor)


def _of_records(records: Iterable[bytes]) -> Iterator[tuple[float, bytes]]:
    for record in records:
        for line in record.splitlines():  # lines after the first that begin with a blank: its tags
            if match := _RECORD.match(line):
                yield int(match.group(1)) / 1e6, match.group(2)


def _of_dmesg(why: str) -> Iterator[tuple[float, bytes]]:
    try:
        printed = subprocess.run(["dmesg"], capture_output=True, timeout=_LONGEST_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"the kernel's ring cannot be read: {why}; dmesg: {error}") from None
    if printed.returncode:
        said = printed.stderr.decode("utf-8", "replace").strip().removeprefix("dmesg: ")
        raise InputError(
            f"the kernel's ring cannot be read: {why}; dmesg: {said or 'failed'}; ask as root, or "
            "hand over a saved copy (`sudo dmesg > FILE`)"
        )
    since_boot_s = 0.0
    for line in printed.stdout.splitlines():
        if match := _PRINTED.match(line):
            since_boot_s = int(match.group(1)) + int(match.group(2)) / 1e6
            line = match.group(3)
        yield since_boot_s, line  # a kernel may print no times: then as the line before
