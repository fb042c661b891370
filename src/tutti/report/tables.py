"""Tables as plain HTML, with meters in their cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tutti.report.page import escape

MOST_ROWS = 256


class Html(str):
    """A text that is HTML already."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Column:
    """The head of a column; figures stand on the right."""

    name: str
    figures: bool = False
    detail: str = ""  # on hover
    kind: Literal["", "whole", "prose"] = ""  # on one line; never squeezed


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table; `strong` marks the one that matters most."""

    cells: Sequence[str]
    strong: bool = False


def table_html(columns: Sequence[Column], rows: Sequence[Row], *, most: int = MOST_ROWS) -> str:
    """Return a table that scrolls by itself where it is wider or longer than its place."""
    heads = "".join(
        f'<th scope="col"{_kind(column)} title="{escape(column.detail)}">{escape(column.name)}</th>'
        for column in columns
    )
    lines = []
    for row in rows[:most]:
        cells = "".join(
            f"<td{_kind(column)}>{cell if isinstance(cell, Html) else escape(cell)}</td>"
            for column, cell in zip(columns, row.cells, strict=True)
        )
        kind = ' class="strong"' if row.strong else ""
        lines.append(f"<tr{kind}>{cells}</tr>")
    rest = len(rows) - most
    more = f'<p class="intro">… and {rest:,} more rows.</p>' if rest > 0 else ""
    return (
        f'<div class="table" tabindex="0" role="region" aria-label="Table"><table><thead><tr>'
        f"{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>{more}"
    )


def _kind(column: Column) -> str:
    kind = "figure" if column.figures else column.kind
    return f' class="{kind}"' if kind else ""


def meter_html(share: float, text: str, *, color: str = "static", alarm: bool = False) -> Html:
    """Return a small bar that is filled to a share of 0…1, with a text beside it."""
    width = f"{100 * min(1.0, max(0.0, share)):.1f}%"
    kind = "alarm" if alarm else color
    return Html(
        f'<span class="meter"><i><b style="width:{width};background:var(--{kind})"></b></i>'
        f"{escape(text)}</span>"
    )
