"""How patterns read messages, and families that a tenth and an eleventh part taught."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tutti.diagnose.finding import Finding
from tutti.diagnose.logs.collect import collect
from tutti.diagnose.logs.reason import diagnose
from tutti.diagnose.logs.signatures import own_catalog
from tutti.diagnose.logs.wording import of_words


def answered(folder: Path, log: str) -> Finding:
    (folder / "job.log").write_text(log + "\n")
    return diagnose(collect([folder / "job.log"], own_catalog()))


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [
        ("fuse.{0,40}error", "connection refused, exceeded error retry count", False),
        ("fuse.{0,40}error", "fuse: error on read", True),
        ("fuse.{0,40}error", "mount_fuse error", True),
        ("Transport endpoint is", "df: transport endpoint is not connected", True),
        ("Out of time|No route to", "ssh: no route to host", True),
        ("OutOfMemory", "RayOutOfMemoryError", True),  # a word of several written together
        ("EIO", "VEIO", False),
        (r"\(os error", "fails(os error 28)", True),  # it begins with no letter
        ("(?i)mesh", "remesh", False),
        ("(?i)mesh", "a MESH", True),
        (r"Check\|x", "Check|x", True),
    ],
)
def test_a_pattern_begins_a_word(pattern: str, text: str, matches: bool) -> None:
    assert bool(re.search(of_words(pattern), text)) == matches


@pytest.mark.parametrize(
    ("log", "component"),
    [
        ("NCCL WARN connect to 169.254.3.1<40213> returned Connection refused", "configuration"),
        ("x.UploadError('An error occurred (ExpiredToken): token has expired')", "configuration"),
        ("botocore.exceptions.NoCredentialsError: Unable to locate credentials", "configuration"),
        ("There was a problem when trying to write in your cache folder (/.c)", "configuration"),
        ("train.sh: line 1:   217 Bus error               (core dumped) python", "configuration"),
        ("TypeError: Config.__init__() got an unexpected keyword argument 'a'", "configuration"),
        ("0x00007fff8f306577 in ?? () from /usr/lib64/nvidia/libcuda.so", "configuration"),
        (
            "RuntimeError: DataLoader worker (pid 1) is killed by signal: Bus error.",
            "configuration",
        ),
        ("error: subprocess-exited-with-error", "configuration"),
        ("df: /mnt/a: transport endpoint is not connected", "storage"),
        ("OSError: Consistency check failed: file should be of size 9 but has size 3", "storage"),
        ("NVRM: Row Remapper: New row (0x0000000001234) marked for remapping", "chip"),
        ("    Uncorrectable Error               : 4", "chip"),
        ("Loading shards:  75%|███| 3/4 [00:08<00:02,  2.83s/it]Killed", "host"),
        ("switch: PFC storm detected on port Ethernet12", "network"),
        ("    Uncorrectable Error               : 0", "undetermined"),
        ("MPI_ABORT was invoked on rank 0 in communicator MPI_COMM_WORLD", "undetermined"),
        ("error Backend response timeout (30s)", "undetermined"),
    ],
)
def test_families_of_many_programs(tmp_path: Path, log: str, component: str) -> None:
    assert answered(tmp_path, log).component.value == component


@pytest.mark.parametrize(
    "log",
    [
        "HIP error: operation not permitted on an event last recorded in a capturing stream",
        "Test NCCL failure 'internal error - please report this issue to the NCCL developers / '",
    ],
)
def test_words_that_look_like_another_family_s(tmp_path: Path, log: str) -> None:
    assert answered(tmp_path, log).cause not in (
        "something may not be read, written or used",
        "a library broke an assertion of its own",
    )


def test_what_nobody_knows_is_not_called_healthy(tmp_path: Path) -> None:
    unknown = answered(tmp_path, "frobnicator went wibbly\nnothing to see here")
    assert not unknown.healthy
    assert unknown.component.value == "undetermined"
    assert unknown.next_steps
    assert answered(tmp_path, "step 1 of 9\nstep 2 of 9").healthy
