"""The figures at the head of a page, and notes below them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tutti.report.page import escape

_UNIT = re.compile(r"(\d) (%|×|[mµ]?s|[KMGT]?i?B)(?!\w)")


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure with its name and, small, what it means."""

    name: str
    value: str
    detail: str = ""
    alarm: bool = False


def tiles_html(tiles: Sequence[Tile]) -> str:
    """Return a row of figures."""
    cells = "".join(
        f'<div class="tile{" alarm" if tile.alarm else ""}"><dt>{escape(tile.name)}</dt>'
        f"<dd>{escape(tile.value)}<small>{_whole(tile.detail)}</small></dd></div>"
        for tile in tiles
    )
    return f'<dl class="tiles">{cells}</dl>'


def _whole(text: str) -> str:
    """Return a text as HTML in which no unit begins a line."""
    return _UNIT.sub(lambda match: f"{match[1]}\u00a0{match[2]}", escape(text))


def notes_html(lines: Sequence[str], *, most: int = 12) -> str:
    """Return warnings as a list; nothing if there are none."""
    if not lines:
        return ""
    shown = [f"<li>{escape(line)}</li>" for line in lines[:most]]
    if len(lines) > most:
        shown.append(f"<li>… and {len(lines) - most} more</li>")
    return f'<ul class="notes" aria-label="Warnings">{"".join(shown)}</ul>'
