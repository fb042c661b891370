"""Tables as plain HTML, with meters in their cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tutti.report.page import escape

MOST_ROWS = 256
_SHOWN_WHOLE = 80  # a longer table scrolls by itself, and says so
_CARDS = 24  # rows that become cards on a phone; more would be a page without end


class Html(str):
    """A text that is HTML already."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Column:
    """The head of a column; figures stand on the right."""

    name: str
    figures: bool = False
    detail: str = ""  # on hover
    # on one line; never squeezed; a little squeezed; the long name of a row, broken where need be
    kind: Literal["", "whole", "prose", "list", "name"] = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table; `strong` marks the one that matters most."""

    cells: Sequence[str]
    strong: bool = False


def table_html(
    columns: Sequence[Column], rows: Sequence[Row], *, most: int = MOST_ROWS, cards: bool = True
) -> str:
    """Return a table; a short one is `cards` on a phone, a long one scrolls by itself."""
    heads = "".join(
        f'<th scope="col"{_kind(column)} title="{escape(column.detail)}">{escape(column.name)}</th>'
        for column in columns
    )
    lines = []
    for row in rows[:most]:
        cells = "".join(
            f'<td{_kind(column)} data-name="{escape(column.name)}">'
            f"{cell if isinstance(cell, Html) else escape(cell)}</td>"
            for column, cell in zip(columns, row.cells, strict=True)
        )
        kind = ' class="strong"' if row.strong else ""
        lines.append(f"<tr{kind}>{cells}</tr>")
    size = (
        "long" if len(lines) > _SHOWN_WHOLE else "cards" if cards and len(lines) <= _CARDS else ""
    )
    return (
        f'<div class="table {size}" tabindex="0" role="region" aria-label="Table"><table><thead>'
        f"<tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
        f"{_count(len(rows), len(lines))}"
    )


def _count(rows: int, shown: int) -> str:
    if shown < rows:
        return f'<p class="intro">{shown:,} of {rows:,} rows are shown; scroll inside of them.</p>'
    scrolls = shown > _SHOWN_WHOLE
    return f'<p class="intro">{rows:,} rows; the table scrolls.</p>' if scrolls else ""


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
