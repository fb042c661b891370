"""A run's folder as evidence: its rings and its figures; and the one answer to what is wrong."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tutti.diagnose.finding import Component, Finding
from tutti.diagnose.runs.hang import diagnose_rings
from tutti.diagnose.runs.steps import Figure, diagnose_steps
from tutti.errors import InputError
from tutti.observe.folder import METRICS, RINGS
from tutti.observe.ring import RingReading, read_rings


def diagnose_run(folder: Path) -> Finding:
    """Return what is wrong with a run, live or over."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; name the output folder of a run")
    rings, notes = read_rings(folder / RINGS)
    figures = read_figures(folder / METRICS, notes)
    if not rings and not figures:
        said = f" ({notes[0]})" if notes else ""
        raise InputError(f"{folder}: has neither rings nor figures of a run{said}")
    alive = any_alive(rings)
    hang = diagnose_rings(rings, now_ns=time.time_ns() if alive else None)
    slow, more = diagnose_steps(figures, rings, str(folder / METRICS))
    notes += [*more, f"{len(rings)} rings; the run is {'alive' if alive else 'over'}"]
    found = hang or slow
    if found is None:
        cause = "nobody hangs, and steps are as regular as they were"
        return Finding(component=Component.UNDETERMINED, healthy=True, confidence=0.6,
                       cause=cause, notes=tuple(notes))  # fmt: skip
    return replace(found, notes=(*found.notes, *notes))


def any_alive(rings: Sequence[RingReading]) -> bool:
    """Tell whether a process of these rings lives on this host."""
    for ring in rings:
        if ring.host != platform.node():
            continue
        try:
            os.kill(ring.process, 0)
        except PermissionError:
            return True
        except (OSError, OverflowError):
            continue
        return True
    return False


def read_figures(path: Path, notes: list[str]) -> list[Figure]:
    """Return the figures of a run's steps; a last line that is not whole is left out."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found: list[Figure] = []
    bad = 0
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
            found.append(
                Figure(line=number, step=int(value["step"]), seconds=float(value["seconds"]),
                       predicted_s=value.get("predicted_s"), pools=value.get("pools") or {})
            )  # fmt: skip
        except (ValueError, KeyError, TypeError):
            bad += number < len(lines)
    if bad:
        notes.append(f"{path}: {bad} lines are no figures of a step")
    return found
