"""Generations of an elastic run that ended though nobody was lost: what the run's log says of them.

Ranks that call a collective with other sizes, or another collective, do not hang: their
communicator notices, the generation ends and the next goes on from its step. That heals a slip, and
a program with a bug does it again. Which of the ranks was wrong its log cannot say.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from tutti.diagnose.finding import Component, Evidence, Finding, Where

_SELF_ENDED = "nobody is lost, but "
_RANKS = re.compile(r"\brank (\d+)(?=:|\))")
_SURE = 0.6


def diagnose_generations(path: Path) -> Finding | None:
    """Return why the newest generation ended that ended by itself; None where none did."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    ended = [
        (n, *fields) for n, line in enumerate(lines, 1) if (fields := _ended(line)) is not None
    ]
    if not ended:
        return None
    number, generation, why = ended[-1]
    ranks = tuple(sorted({int(rank) for rank in _RANKS.findall(why)}))
    times = f", the last of {len(ended)} that did" if len(ended) > 1 else ""
    return Finding(
        component=Component.SOFTWARE,
        cause=f"generation {generation} ended though nobody was lost{times}: {why}",
        confidence=_SURE,
        where=Where(ranks=ranks),
        evidence=(Evidence(file=str(path), line=number, text=why),),
        remedy="call collectives of your own on all ranks, at the same place, with the same sizes",
    )


def _ended(line: str) -> tuple[int, str] | None:
    try:
        entry = json.loads(line)
        generation, why = int(entry["generation"]), str(entry["why"])
    except (ValueError, KeyError, TypeError):
        return None  # half written, or of another version
    if not why.startswith(_SELF_ENDED):
        return None
    return generation, why.removeprefix(_SELF_ENDED)
