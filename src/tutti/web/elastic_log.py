"""The log of an elastic run as documents: generations, what the job did when, decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tutti.elastic.generations import Generation, generations, phases
from tutti.elastic.journal import FOLDER, LOG, Entry, read_journal
from tutti.errors import InputError
from tutti.web.watched import Document

_MOST = 500  # of each kind, the newest
_MOST_CHIPS = 8  # named in a row


class ElasticLog:
    """What a run's log has come to; read again only when it grew."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / FOLDER / LOG
        self._stamp: object = None
        self._entries: list[Entry] = []

    def entries(self, notes: list[str]) -> Sequence[Entry]:
        """Return the decisions; none of a run that is not elastic."""
        try:
            status = self._path.stat()
            stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
            if stamp != self._stamp:
                self._entries = read_journal(self._folder)
                self._stamp = stamp
        except FileNotFoundError:
            self._entries, self._stamp = [], None
        except (InputError, OSError) as error:
            notes.append(str(error))
        return self._entries

    def document(self, now: float | None, notes: list[str]) -> Document:
        """Return the log's part of a view; `now` is None of a run that is over."""
        entries = self.entries(notes)
        until = max(now or 0.0, entries[-1].at) if entries else 0.0
        return {
            "generations": [_row(one, until) for one in generations(entries)[-_MOST:]],
            "phases": [asdict(span) for span in phases(entries, until)[-_MOST:]],
            "decisions": [
                {"at": e.at, "generation": e.generation, "phase": e.phase, "why": e.why,
                 "step": e.step, "ranks": len(e.ranks)}
                for e in entries[-_MOST:]
            ],
        }  # fmt: skip


def _row(one: Generation, until: float) -> Document:
    end = until if one.left is None else one.left
    return {
        "number": one.number, "entered": one.entered, "step": one.step, "source": one.source,
        "plan": Path(one.plan).name, "ranks": len(one.chips),
        "lost": _names(one.lost), "gained": _names(one.gained), "back_s": one.back_s,
        "trained_s": None if one.ran is None else max(0.0, end - one.ran),
        "why": one.why, "over": one.over, "alive": one.left is None,
    }  # fmt: skip


def _names(chips: Sequence[str]) -> str:
    more = f" and {len(chips) - _MOST_CHIPS} more" if len(chips) > _MOST_CHIPS else ""
    return ", ".join(chips[:_MOST_CHIPS]) + more
