"""A folder of flight recorders' dumps as one answer: PyTorch's, or rings of ours."""

from __future__ import annotations

from pathlib import Path

from tutti.diagnose.dumps.records import read_dumps
from tutti.diagnose.dumps.verdict import diagnose_dumps
from tutti.diagnose.finding import Component, Finding
from tutti.diagnose.runs.clocks import on_one_clock
from tutti.diagnose.runs.recorded_hang import diagnose_rings
from tutti.errors import InputError
from tutti.observe.folder import RINGS
from tutti.observe.ring import read_rings


def diagnose_dump_folder(folder: Path) -> Finding:
    """Return which ranks the others wait for; where rings of ours lie there, they are read."""
    rings, notes = read_rings(folder)
    if rings:
        rings, apart = on_one_clock(rings, "")
        return diagnose_rings(rings, (*notes, *apart)) or Finding(
            component=Component.UNDETERMINED, healthy=True, confidence=0.8,
            cause=f"{len(rings)} rings: every rank is where the others are", notes=tuple(notes),
        )  # fmt: skip
    if (folder / RINGS).is_dir():
        raise InputError(f"{folder}: is the folder of a run of tutti's; tutti doctor run {folder}")
    if notes:
        raise InputError(f"{folder}: no ring can be used ({notes[0]})")
    return diagnose_dumps(*read_dumps(folder))
