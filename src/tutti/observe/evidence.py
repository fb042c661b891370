"""What a run tells of itself over HTTP, for a doctor elsewhere: its last figures and its rings.

An archive of the files that the doctor reads in a run's folder: the end of `metrics.jsonl`, and of
every ring its newest events. Logs, series and checkpoints stay where they are.
"""

from __future__ import annotations

import io
import re
import zipfile
from pathlib import Path

from tutti.errors import InputError
from tutti.observe.folder import METRICS, RINGS
from tutti.observe.ring import shortened_ring

PATH = "/evidence"  # beside /metrics
NOW = "X-Tutti-Time-Ns"  # the run's wall clock when it answered
MOST_BYTES = 256 << 20
_FIGURES_BYTES = 8 << 20
_RING_EVENTS = 1 << 11
_NAMES = re.compile(rf"{re.escape(METRICS)}|{re.escape(RINGS)}/rank-\d{{5,9}}\.ring")


def packed_evidence(folder: Path) -> bytes:
    """Return the evidence in a run's folder as an archive."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        if figures := _end_of(folder / METRICS):
            archive.writestr(METRICS, figures)
        for path in sorted((folder / RINGS).glob("rank-*.ring")):
            try:
                archive.writestr(f"{RINGS}/{path.name}", shortened_ring(path, _RING_EVENTS))
            except InputError:  # of another version, cut off, just being made
                continue
    return out.getvalue()


def unpack_evidence(data: bytes, folder: Path) -> None:
    """Write what an archive holds into a folder; what is none of ours is refused."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            if sum(entry.file_size for entry in entries) > MOST_BYTES:
                raise InputError(f"more than {MOST_BYTES >> 20} MiB of evidence")
            for entry in entries:
                if not _NAMES.fullmatch(entry.filename):
                    raise InputError(
                        f"holds '{entry.filename[:80]}', which is no evidence of a run"
                    )
                target = folder / entry.filename
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(entry))
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise InputError(f"no evidence of a run ({error})") from None


def _end_of(path: Path) -> bytes:
    """Return the last lines of a file, whole ones."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, io.SEEK_END)
            file.seek(max(0, size - _FIGURES_BYTES))
            data = file.read(_FIGURES_BYTES)
    except OSError:
        return b""
    return data if size <= _FIGURES_BYTES else data.partition(b"\n")[2]
