"""Rings of a run as files that other tools open."""

from __future__ import annotations

import json
from pathlib import Path

from tutti.errors import InputError
from tutti.files import write_text
from tutti.observe.folder import RINGS
from tutti.observe.ring import RingReading, read_rings
from tutti.observe.ring_export import chrome_trace, flight_record


def _rings(folder: Path) -> list[RingReading]:
    rings, notes = read_rings(folder / RINGS)
    if not rings:
        raise InputError(f"{folder}: no rings in it" + (f" ({notes[0]})" if notes else ""))
    return rings


def write_trace(folder: Path, path: Path) -> None:
    """Write a run's rings as a Chrome trace."""
    write_text(path, json.dumps(chrome_trace(_rings(folder))))


def write_flight_records(folder: Path, into: Path) -> None:
    """Write a run's rings in the form of PyTorch's flight records, as JSON."""
    into.mkdir(parents=True, exist_ok=True)
    for ring in _rings(folder):
        write_text(into / f"rank_{ring.rank}.json", json.dumps(flight_record(ring)))
