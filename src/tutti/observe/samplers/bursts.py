"""Bursts: hosts' figures ten times a second for a while, because somebody asks for them.

Who asks writes a request into the folder of a run's series. The sampling of each host finds it
within a second, and writes a line per sample into a file of its own beside its store.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.errors import InputError
from tutti.files import write_text
from tutti.observe.samplers.sampler import Values

REQUEST = "burst.json"
EVERY_S = 0.1
MOST_S = 600.0
_NAME = "burst-{name}-{stem}.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstRequest:
    """What was asked for."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstRow:
    """One sample of a host: counters as growth per second."""

    at: float
    host: str
    values: Values


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstFigure:
    """What a figure of a host was during a burst."""

    host: str
    figure: str
    samples: int
    mean: float
    least: float
    most: float


def ask_for_burst(folder: Path, seconds: float) -> BurstRequest:
    """Ask all hosts that keep series in a folder; only one burst at a time is answered."""
    if not 0.0 < seconds <= MOST_S:
        raise InputError(f"a burst of {seconds:g} s: give more than 0 and at most {MOST_S:g} s")
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; only a run that samples its hosts has one")
    request = BurstRequest(name=secrets.token_hex(4), seconds=seconds)
    document = {"name": request.name, "seconds": request.seconds}
    write_text(folder / REQUEST, json.dumps(document) + "\n")
    return request


def take_back(folder: Path) -> None:
    """Let nobody answer a request any more."""
    (folder / REQUEST).unlink(missing_ok=True)


def request_in(folder: Path) -> BurstRequest | None:
    """Return what is asked for; None where nothing is, or nothing that can be read."""
    try:
        document = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
        name, seconds = str(document["name"]), float(document["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not name.isalnum() or not 0.0 < seconds <= MOST_S:
        return None
    return BurstRequest(name=name, seconds=seconds)


class Burst:
    """A burst that is being taken on this host."""

    def __init__(self, request: BurstRequest, store: Path, host: str) -> None:
        self._ends = time.monotonic() + request.seconds
        name = _NAME.format(name=request.name, stem=store.stem)
        self._file = store.with_name(name).open("w", encoding="utf-8", buffering=1)
        self._host = host

    @property
    def is_over(self) -> bool:
        """Whether it has lasted as long as was asked."""
        return time.monotonic() >= self._ends

    def write(self, values: Values) -> None:
        """Write a sample; what is no number is left out."""
        known = {name: value for name, value in values.items() if math.isfinite(value)}
        line = {"at": round(time.time(), 3), "host": self._host, "values": known}
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Write no more."""
        self._file.close()


def read_burst(folder: Path, request: BurstRequest) -> Iterator[BurstRow]:
    """Yield the samples of all hosts; a line that is not whole is left out."""
    for path in sorted(folder.glob(_NAME.format(name=request.name, stem="*"))):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            row = _row(line)
            if row is not None:
                yield row


def _row(line: str) -> BurstRow | None:
    try:
        document: Any = json.loads(line)
        values = {str(name): float(value) for name, value in document["values"].items()}
        return BurstRow(at=float(document["at"]), host=str(document["host"]), values=values)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def burst_figures(rows: Iterator[BurstRow]) -> list[BurstFigure]:
    """Return each figure of each host, those that moved most first."""
    numbers: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        for name, value in row.values.items():
            numbers.setdefault((row.host, name), []).append(value)
    figures = [
        BurstFigure(
            host=host, figure=name, samples=len(all_of), mean=sum(all_of) / len(all_of),
            least=min(all_of), most=max(all_of),
        )
        for (host, name), all_of in numbers.items()
    ]  # fmt: skip
    return sorted(figures, key=lambda one: (-_restlessness(one), one.host, one.figure))


def _restlessness(one: BurstFigure) -> float:
    """Return how far a figure went from its least, beside its mean."""
    return (one.most - one.least) / abs(one.mean) if one.mean else 0.0
