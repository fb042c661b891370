"""Series: the figures of all hosts of a run over time, in one SQLite file.

A row holds a minute of one host, all its figures together, packed: 32-bit numbers whose last bits
are cut (they keep four digits), laid out byte by byte and compressed. Beside the seconds stand 10 s
and 60 s with least, mean and most of each, so that a burst of a second stays visible in a day.
What only grows is kept as its growth per second.
"""

from __future__ import annotations

import functools
import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tutti.errors import DamagedError, InputError
from tutti.observe.packed_rows import CHUNK, Floats, figures_of, packed, unpacked

LEVELS = (1, 10, 60)  # seconds of a value
_SUMMARY_EVERY_S = 300  # least, mean and most are written so often, and at the end
_VERSION = 1
Pick = Callable[[Sequence[str]], Sequence[int]]
_MAKE = """
create table if not exists facts (name text primary key, value text);
create table if not exists layouts (id integer primary key, names text unique);
create table if not exists chunks (
  level integer, start integer, host text, layout integer, data blob,
  primary key (level, start, host)) without rowid;
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """One figure of one host; of a level above a second also its least and most."""

    host: str
    name: str
    seconds: npt.NDArray[np.int64]
    mean: Floats
    least: Floats
    most: Floats


class Table(NamedTuple):
    """A figure of a host in a minute: its values by second, not a number where there is none."""

    host: str
    start: int
    name: str
    values: Floats


class SeriesStore:
    """The store of a run, for writing or reading."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._path = path
        if read_only and not path.exists():
            raise InputError(f"{path}: no such file")
        try:
            name = f"file:{path.resolve()}?mode=ro" if read_only else str(path)
            self._base = sqlite3.connect(name, uri=read_only, timeout=5, check_same_thread=False)
            if not read_only:
                self._base.executescript("pragma synchronous=off;" + _MAKE)
            self._check_version(read_only=read_only)
        except sqlite3.Error as error:
            raise _said(path, error) from None
        self._layouts: dict[tuple[str, ...], int] = {}
        self._open: dict[str, _Minute] = {}
        self._summaries: dict[tuple[str, int], _Summary] = {}

    def _check_version(self, *, read_only: bool) -> None:
        rows = self._rows("select value from facts where name = 'version'", ())
        row = rows[0] if rows else None
        if row is None and not read_only:
            self._base.execute("insert into facts values ('version', ?)", (str(_VERSION),))
            self._base.commit()
        elif row is None or row[0] != str(_VERSION):
            version = "none" if row is None else row[0]
            raise InputError(f"{self._path}: a store of version {version}; this reads {_VERSION}")

    # --- writing -----------------------------------------------------------------------------

    def append(self, host: str, second: int, values: Mapping[str, float]) -> None:
        """Take the figures of a host at a second; seconds come in order."""
        self.append_row(host, second, tuple(values), np.fromiter(values.values(), np.float32))

    def append_row(self, host: str, second: int, names: tuple[str, ...], row: Floats) -> None:
        """Take figures whose names are the same every second, which is faster."""
        minute = self._open.get(host)
        start = second - second % CHUNK
        if minute is None or minute.start != start:
            if minute is not None:
                self._write(host, minute)
            minute = self._open[host] = _Minute(start, names)
            self._merge(host, minute)
        minute.put(second - start, names, row)

    def flush(self, *, summaries: bool = True) -> None:
        """Write what is not yet in the file; without `summaries` only seconds, which is faster."""
        for host, minute in self._open.items():
            self._write(host, minute, whole=summaries)

    def close(self) -> None:
        """Write what is left, and let go of the file."""
        self.flush()
        self._base.close()

    def close_reading(self) -> None:
        """Let go of a file that was only read."""
        self._base.close()

    def _merge(self, host: str, minute: _Minute) -> None:
        """Take over what the file already has of a minute: the run was started again in it."""
        rows = self._rows(
            "select layout, data from chunks where level = 1 and start = ? and host = ?",
            (minute.start, host),
        )
        if rows and (names := self._layouts_by_id().get(rows[0][0])) is not None:
            for second, values in enumerate(unpacked(rows[0][1], (len(names), CHUNK)).T):
                minute.put(second, names, values)

    def _layouts_by_id(self) -> dict[int, tuple[str, ...]]:
        return {
            i: tuple(_names(text)) for i, text in self._rows("select id, names from layouts", ())
        }

    def _write(self, host: str, minute: _Minute, *, whole: bool = False) -> None:
        """Write a minute; what sums it up only now and then, or where `whole` asks for it."""
        try:
            self._put(1, minute.start, host, minute.names, minute.values)
            for level in LEVELS[1:]:
                summary = self._summed(host, minute, level)
                done = minute.start + CHUNK - summary.start
                if whole or done % _SUMMARY_EVERY_S == 0 or done == level * CHUNK:
                    self._put(level, summary.start, host, summary.names, summary.table)
            self._base.commit()
        except sqlite3.Error as error:
            raise _said(self._path, error) from None

    def _put(
        self, level: int, start: int, host: str, names: tuple[str, ...], values: Floats
    ) -> None:
        self._base.execute(
            "insert or replace into chunks values (?, ?, ?, ?, ?)",
            (level, start, host, self._layout(names), packed(values)),
        )

    def _summed(self, host: str, minute: _Minute, level: int) -> _Summary:
        """Take a minute into its row of a higher level."""
        start = minute.start - minute.start % (level * CHUNK)
        summary = self._summaries.get((host, level))
        if summary is None or summary.start != start:
            if summary is not None:
                self._put(level, summary.start, host, summary.names, summary.table)
            summary = self._summaries[host, level] = self._summary(host, start, level)
        count, first = CHUNK // level, (minute.start - start) // level
        parts = minute.values.reshape(len(minute.names), count, level)
        filled = np.isfinite(parts)
        some, counts = filled.any(axis=2), np.maximum(filled.sum(axis=2), 1)
        least = np.where(filled, parts, np.inf).min(axis=2)
        most = np.where(filled, parts, -np.inf).max(axis=2)
        mean = np.where(filled, parts, 0).sum(axis=2) / counts
        rows = summary.rows_of(minute.names)
        for index, values in enumerate((least, mean, most)):
            summary.table[rows, index, first : first + count] = np.where(some, values, np.nan)
        return summary

    def _summary(self, host: str, start: int, level: int) -> _Summary:
        """Return the row of a higher level that begins then, with what the file has of it."""
        row = self._base.execute(
            "select layout, data from chunks where level = ? and start = ? and host = ?",
            (level, start, host),
        ).fetchone()
        names = self._layouts_by_id().get(row[0], ()) if row else ()
        shape = (len(names), 3, CHUNK)
        table = unpacked(row[1], shape) if names else np.full(shape, np.nan, np.float32)
        return _Summary(start, names, table)

    def _layout(self, names: tuple[str, ...]) -> int:
        if names not in self._layouts:
            text = json.dumps(names)
            self._base.execute("insert or ignore into layouts (names) values (?)", (text,))
            row = self._base.execute("select id from layouts where names = ?", (text,)).fetchone()
            self._layouts[names] = int(row[0])
        return self._layouts[names]

    # --- reading -----------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the keys of all figures."""
        rows = self._rows("select names from layouts", ())
        return sorted({name for (text,) in rows for name in json.loads(text)})

    def last_second(self) -> int:
        """Return the last second that has a value; 0 where none has."""
        row = self._rows(
            "select start, layout, data from chunks where level = 1 order by start desc limit 1", ()
        )
        if not row:
            return 0
        start, layout, data = row[0]
        names = self._layouts_by_id()[layout]
        _, values = next(figures_of(data, [0], (len(names), CHUNK), str(self._path)))
        known = np.flatnonzero(np.isfinite(values))
        return int(start + (known[-1] if len(known) else 0))

    def version(self) -> int:
        """Return a number that changes when others have written; cheap."""
        return int(self._rows("pragma data_version", ())[0][0])

    def read(self, name: str, start: int, stop: int, *, level: int = 1) -> list[Series]:
        """Return a figure of every host that has it, from `start` up to but not with `stop`.

        A name without a label is of all its labels, which come as series of their own.
        """
        if level not in LEVELS:
            raise ValueError(f"no level of {level} s")
        width = level * CHUNK
        rows = self._rows(
            "select start, host, layout, data from chunks where level = ? and start > ? "
            "and start < ? order by host, start",
            (level, start - width, stop),
        )
        layouts = dict(self._rows("select id, names from layouts", ()))
        parts: dict[tuple[str, str], list[tuple[int, Floats]]] = {}
        for begin, host, layout, data in rows:
            names = _names(layouts[layout])
            wanted = [i for i, n in enumerate(names) if n == name or n.startswith(name + "{")]
            if not wanted:
                continue
            shape = (len(names), CHUNK) if level == 1 else (len(names), 3, CHUNK)
            for i, values in figures_of(data, wanted, shape, str(self._path)):
                parts.setdefault((host, names[i]), []).append((begin, values))
        return [_series(key, chunks, start, stop, level) for key, chunks in parts.items()]

    def tables(
        self, start: int, stop: int, pick: Pick = lambda names: range(len(names))
    ) -> Iterator[Table]:
        """Yield the minutes that have seconds from `start` up to but not with `stop`, whole.

        `pick` returns which of a minute's figures are wanted, by their places, which rise.
        """
        layouts = dict(self._rows("select id, names from layouts", ()))
        rows = self._rows(
            "select start, host, layout, data from chunks where level = 1 and start > ? "
            "and start < ? order by host, start",
            (start - CHUNK, stop),
        )
        for begin, host, layout, data in rows:
            names = _names(layouts[layout])
            if not (wanted := pick(names)):
                continue
            shape = (len(names), CHUNK)
            for i, values in figures_of(data, wanted, shape, str(self._path)):
                yield Table(host, begin, names[i], values)

    def _rows(self, query: str, values: tuple[Any, ...]) -> list[Any]:
        try:
            return self._base.execute(query, values).fetchall()
        except sqlite3.Error as error:
            if "readonly database" not in str(error):
                raise _said(self._path, error) from None
        try:
            _take_back(self._path)
            return self._base.execute(query, values).fetchall()
        except sqlite3.Error:
            raise InputError(
                f"{self._path}: its writer was killed in the middle of a row, which cannot be "
                "taken back here; copy the folder to where it can be written"
            ) from None


class _Table:
    """Values by figure, to which further figures may come: what came or went leaves the others."""

    def __init__(self, start: int, names: tuple[str, ...], values: Floats) -> None:
        self.start, self.names, self.table = start, names, values
        self._rows: dict[tuple[str, ...], slice | list[int]] = {names: slice(None)}

    def rows_of(self, names: tuple[str, ...]) -> slice | list[int]:
        """Return the rows of figures, in their order, made where there are none."""
        if names not in self._rows:
            known = set(self.names)
            new = tuple(name for name in names if name not in known)
            if new:
                self.names += new
                empty = np.full((len(new), *self.table.shape[1:]), np.nan, np.float32)
                self.table = np.concatenate([self.table, empty])
                self._rows.clear()
            index = {name: i for i, name in enumerate(self.names)}
            self._rows[names] = [index[name] for name in names]
        return self._rows[names]


class _Minute(_Table):
    """A minute of a host that is not yet in the file."""

    def __init__(self, start: int, names: tuple[str, ...]) -> None:
        super().__init__(start, names, np.full((len(names), CHUNK), np.nan, np.float32))

    @property
    def values(self) -> Floats:
        """The numbers, by figure and second."""
        return self.table

    def put(self, second: int, names: tuple[str, ...], values: Floats) -> None:
        """Take a second's values."""
        rows = self.rows_of(names)
        self.table[rows, second] = values


class _Summary(_Table):
    """A row of a higher level, which minutes fill."""


@functools.lru_cache(maxsize=256)
def _names(text: str) -> list[str]:
    return list(json.loads(text))


def joined(tables: Sequence[Table], start: int) -> Series:
    """Return minutes of one figure and host, in order, as a series from `start` on."""
    seconds = np.concatenate([one.start + np.arange(CHUNK) for one in tables])
    values = np.concatenate([one.values for one in tables])
    kept = (seconds >= start) & np.isfinite(values)
    own = values[kept]
    return Series(
        host=tables[0].host, name=tables[0].name, seconds=seconds[kept], mean=own, least=own,
        most=own,
    )  # fmt: skip


def _series(
    key: tuple[str, str], chunks: list[tuple[int, Floats]], start: int, stop: int, level: int
) -> Series:
    seconds = _seconds(tuple(begin for begin, _ in chunks), level)
    values = np.concatenate([part for _, part in chunks], axis=-1)
    mean = values if level == 1 else values[1]
    kept = np.flatnonzero((seconds >= start) & (seconds < stop) & np.isfinite(mean))
    least, mean, most = [values[kept]] * 3 if level == 1 else values[:, kept]
    return Series(
        host=key[0], name=key[1], seconds=seconds[kept], mean=mean, least=least, most=most
    )


@functools.lru_cache(maxsize=8)
def _seconds(begins: tuple[int, ...], level: int) -> npt.NDArray[np.int64]:
    return np.concatenate([begin + level * np.arange(CHUNK) for begin in begins])


def _take_back(path: Path) -> None:
    """Let SQLite take back what a writer that was killed had half written; readers may not."""
    base = sqlite3.connect(path, timeout=5)
    try:
        base.execute("select name from facts limit 1").fetchall()
    finally:
        base.close()


def _said(path: Path, error: sqlite3.Error) -> InputError:
    text = str(error)
    if "malformed" in text or "not a database" in text:
        return DamagedError(f"{path}: the store is damaged ({text})")
    if "locked" in text:
        return InputError(f"{path}: another process holds the store; try again")
    return InputError(f"{path}: cannot be used ({text})")
