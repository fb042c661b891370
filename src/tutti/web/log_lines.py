"""The lines of a run's logs around one of them, or around a moment."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path

from tutti.diagnose.logs.identity import Identity, of_line
from tutti.diagnose.logs.reading import cleaned
from tutti.web.watched import Document, Query, missing, whole_number

FOLDER = "logs"
_AROUND = 60  # lines on either side
_MOST_FILES = 5000
_LONGEST = 2000  # characters of a line
_MOST_BYTES = 256 << 20
_NOBODY = Identity()


def log_names(folder: Path) -> list[str]:
    """Return the logs of a run: files of its folder `logs`, and `*.log`, `*.out`, `*.err`."""
    inside = [p for p in (folder / FOLDER).glob("**/*") if p.is_file()]
    inside += [p for p in folder.iterdir() if p.is_file() and p.suffix in (".log", ".out", ".err")]
    names = sorted(p.relative_to(folder).as_posix() for p in inside if not p.is_symlink())
    return names[:_MOST_FILES]


def logs_view(folder: Path, query: Query) -> Document:
    """Return lines of a log: around `line`, around the moment `at`, or the last ones."""
    names = log_names(folder)
    if not names:
        return missing(f"no logs in {folder.name}: neither {FOLDER}/ nor *.log, *.out, *.err")
    asked = query.get("file", "")
    name = asked if asked in names else names[0]  # nothing else can be opened
    refused = f"'{asked}' is no log of this run" if asked and asked != name else ""
    try:
        lines = list(_lines(folder / name))
    except OSError as error:
        return missing(f"{name}: cannot be read ({error.strerror})")
    at = whole_number(query, "at", 0)
    wanted = whole_number(query, "line", 0)
    note = refused
    if at and not wanted:
        wanted, note = _nearest(lines, at), note or _about(lines)
    middle = min(len(lines), wanted) if wanted else len(lines)
    first = max(0, middle - 1 - _AROUND)
    shown = lines[first : middle + _AROUND]
    return {
        "files": names,
        "file": name,
        "lines": [[first + i + 1, text] for i, text in enumerate(shown)],
        "line": wanted,
        "of": len(lines),
        "note": note,
    }


def _lines(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _MOST_BYTES))
        for line in file:
            yield cleaned(line[: 4 * _LONGEST].decode("utf-8", "replace"))[:_LONGEST]


def _nearest(lines: list[str], at: int) -> int:
    """Return the number of the first line that was said at a moment or later; 0 if none has one."""
    known = [(moment, i + 1) for i, text in enumerate(lines)
             if (moment := of_line(text, _NOBODY).time) is not None]  # fmt: skip
    if not known:
        return 0
    place = bisect_left(known, (float(at), 0))
    return known[min(place, len(known) - 1)][1]


def _about(lines: list[str]) -> str:
    if any(of_line(text, _NOBODY).time is not None for text in lines[:200]):
        return ""
    return "its lines have no times; these are the last ones"
