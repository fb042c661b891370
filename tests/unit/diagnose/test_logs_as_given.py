"""Whatever is handed to the doctor as a log: pipes, archives, words that nobody knows."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest

from tutti.diagnose.finding import Component, Finding
from tutti.diagnose.logs.collect import collect
from tutti.diagnose.logs.reading import STANDARD_INPUT, log_files
from tutti.diagnose.logs.reason import diagnose
from tutti.diagnose.logs.signatures import own_catalog

ECC = b"[rank1]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n"


def answer(path: Path) -> Finding:
    return diagnose(collect([path], own_catalog()))


def archive(kind: str) -> bytes:
    out = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(out, "w") as packed:
            packed.writestr("a.log", ECC)
    elif kind == "zstd":
        return b"\x28\xb5\x2f\xfd" + ECC
    else:
        with tarfile.open(fileobj=out, mode="w:gz" if kind == "tar.gz" else "w") as packed_:
            member = tarfile.TarInfo("a.log")
            member.size = len(ECC)
            packed_.addfile(member, io.BytesIO(ECC))
    return out.getvalue()


@pytest.mark.parametrize("packed", [False, True])
def test_a_pipe_is_read(packed: bool) -> None:
    reader, writer = os.pipe()
    data = gzip.compress(ECC * 3) if packed else ECC * 4_000  # more than a pipe holds
    assert packed or len(data) > 1 << 17

    def write() -> None:
        with os.fdopen(writer, "wb") as end:
            end.write(data)

    thread = threading.Thread(target=write)
    thread.start()
    found = answer(Path(f"/proc/self/fd/{reader}"))
    thread.join()
    os.close(reader)
    assert (found.component, found.where.ranks) == (Component.CHIP, (1,))


def test_a_dash_is_what_is_piped_in() -> None:
    assert log_files([Path("-")]) == [STANDARD_INPUT]


@pytest.mark.parametrize("kind", ["zip", "zstd", "tar", "tar.gz"])
def test_an_archive_is_said(kind: str, tmp_path: Path) -> None:
    (tmp_path / "logs").write_bytes(archive(kind))
    found = answer(tmp_path / "logs")
    assert found.exit_code == 2
    assert found.cause == "none of these files could be read as a log"
    assert "unpack it first" in found.notes[0]


def test_damage_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(ECC)[:-6])
    found = answer(tmp_path / "a.log.gz")
    assert found.component is Component.CHIP
    assert len([note for note in found.notes if "ends early" in note]) == 1


@pytest.mark.parametrize(
    "line",
    ["Traceback (most recent call last):", "fatal: giving up", "frobnicator: error 77",
     "worker 3 exited with code 77", "FATAL something", "the supervisor killed it"],
)  # fmt: skip
def test_trouble_in_unknown_words_is_undetermined_and_not_healthy(
    line: str, tmp_path: Path
) -> None:
    (tmp_path / "a.log").write_text(f"step 1\n{line}\nmylib.Boom: whatever\n")
    found = answer(tmp_path / "a.log")
    assert (found.component, found.exit_code) == (Component.UNDETERMINED, 2)
    assert not found.healthy
    assert found.confidence == 0.0


@pytest.mark.parametrize(
    "line",
    ["non-fatal warning: retrying", "fatal=false", "error code 0", "exited with code 0",
     "errors=0 restarts=0", "exit status: 0"],
)  # fmt: skip
def test_words_of_trouble_that_say_there_is_none(line: str, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(f"step 1\n{line}\nstep 2\n")
    assert answer(tmp_path / "a.log").healthy
