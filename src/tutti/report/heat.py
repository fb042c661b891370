"""A matrix of shares as coloured cells: plain HTML, readable without scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tutti.report.page import escape

MOST_ROWS = 400


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure: its share of what is possible, how it is written, and more on hover."""

    share: float
    text: str
    detail: str = ""


def heat_html(
    corner: str,
    columns: Sequence[str],
    rows: Sequence[tuple[str, Mapping[str, Cell]]],
    *,
    most: int = MOST_ROWS,
) -> str:
    """Return a table whose cells are the darker the nearer they are to what is possible."""
    heads = "".join(f'<th scope="col" class="figure">{escape(name)}</th>' for name in columns)
    lines = []
    for name, cells in rows[:most]:
        body = "".join(_cell(cells.get(column)) for column in columns)
        lines.append(f"<tr><td>{escape(name)}</td>{body}</tr>")
    rest = len(rows) - most
    more = f'<p class="intro">… and {rest:,} more rows.</p>' if rest > 0 else ""
    return (
        '<div class="table heat" tabindex="0" role="region" aria-label="Heat map"><table><thead>'
        f'<tr><th scope="col">{escape(corner)}</th>{heads}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>{more}"
    )


def heats_html(maps: Sequence[tuple[str, str]]) -> str:
    """Return heat maps beside each other, each under its name."""
    figures = "".join(
        f"<figure><figcaption>{escape(name)}</figcaption>{body}</figure>" for name, body in maps
    )
    return f'<div class="heats">{figures}</div>'


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return "<td></td>"
    share = min(1.0, max(0.0, cell.share)) ** 2  # most are near the best: spread them out
    return (
        f'<td class="figure" style="--share:{100 * share:.0f}%" title="{escape(cell.detail)}">'
        f"{escape(cell.text)}</td>"
    )
