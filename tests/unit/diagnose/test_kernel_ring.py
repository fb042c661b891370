"""`doctor logs --kernel`: the kernel's ring as a log, and what is said where it may not be read."""

from __future__ import annotations

import os
import stat
import time
from datetime import datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tutti.cli.main import app
from tutti.diagnose.finding import Component
from tutti.diagnose.logs import kernel_ring
from tutti.diagnose.logs.collect import collect
from tutti.diagnose.logs.kernel_ring import KERNEL, kernel_lines
from tutti.diagnose.logs.reason import diagnose
from tutti.diagnose.logs.signatures import own_catalog
from tutti.errors import InputError

RECORDS = b"""6,1,1000000,-;Kernel command line: panic=1 console=ttyS0
3,2,2500000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus.
 SUBSYSTEM=pci
 DEVICE=+pci:0000:3b:00.0
4,3,2600000,-;a name ;with, marks
"""
PRINTED = """[    1.000000] Kernel command line: panic=1 console=ttyS0
[    2.500000] NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus.
[    2.600000] a name ;with, marks
"""


def fake_dmesg(folder: Path, script: str) -> None:
    path = folder / "dmesg"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize("source", ["kmsg", "dmesg"])
def test_the_ring_is_read_either_way(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kmsg = tmp_path / "kmsg"
    if source == "kmsg":
        kmsg.write_bytes(RECORDS)
        monkeypatch.setenv("PATH", "")
    else:
        (tmp_path / "out").write_text(PRINTED)
        fake_dmesg(tmp_path, f'while read -r l; do echo "$l"; done < {tmp_path / "out"}')
        monkeypatch.setenv("PATH", str(tmp_path))
    lines = kernel_lines(kmsg).decode().splitlines()
    assert [line.split(" kernel: ")[1] for line in lines] == [
        "Kernel command line: panic=1 console=ttyS0",
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus.",
        "a name ;with, marks",
    ]
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    assert datetime.fromisoformat(lines[1].split()[0]).timestamp() == pytest.approx(
        booted + 2.5, abs=5
    )


def test_a_kernel_that_prints_no_times_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus."
    fake_dmesg(tmp_path, f'echo "{text}"')
    monkeypatch.setenv("PATH", str(tmp_path))
    (line,) = kernel_lines(tmp_path / "kmsg").decode().splitlines()
    assert line.split(" kernel: ")[1] == text


def test_a_fault_in_the_ring_is_told_of_this_host_beside_a_ranks_log(tmp_path: Path) -> None:
    (tmp_path / "kmsg").write_bytes(RECORDS)
    log = tmp_path / "rank_3.log"
    log.write_text("[rank3]: torch.distributed.DistBackendError: remote process exited\n")
    texts = {KERNEL: kernel_lines(tmp_path / "kmsg")}
    finding = diagnose(collect([log], own_catalog(), texts=texts))
    assert finding.component is Component.CHIP
    assert finding.where.hosts == (os.uname().nodename,)
    assert (finding.evidence[0].file, finding.evidence[0].line) == (KERNEL, 2)


def test_a_kernel_that_started_and_no_more_is_healthy(tmp_path: Path) -> None:
    (tmp_path / "kmsg").write_bytes(RECORDS.splitlines(keepends=True)[0])
    texts = {KERNEL: kernel_lines(tmp_path / "kmsg")}
    assert diagnose(collect([], own_catalog(), texts=texts)).healthy


@pytest.mark.parametrize(
    ("script", "said"),
    [("echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1",
      "dmesg: read kernel buffer failed: Operation not permitted; ask as root"),
     (None, "dmesg: [Errno 2] No such file")],
)  # fmt: skip
def test_without_permission_or_dmesg_it_is_a_line(
    script: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script is not None:
        fake_dmesg(tmp_path, script)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(kernel_ring, "KMSG", tmp_path / "none")
    with pytest.raises(InputError) as raised:
        kernel_lines(tmp_path / "none")
    assert "cannot be read" in str(raised.value)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_neither_logs_nor_the_kernel_is_a_line() -> None:
    with pytest.raises(InputError, match="or --kernel"):
        CliRunner().invoke(app, ["doctor", "logs"], catch_exceptions=False)
