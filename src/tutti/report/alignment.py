"""The page of an alignment: two runs of one model, module by module, and where they part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tutti.report.loss_curves import loss_section
from tutti.report.page import Page, Section, escape
from tutti.report.tables import Column, Html, Row, meter_html, table_html
from tutti.report.tiles import Tile, notes_html, tiles_html

MOST_ROWS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignmentRow:
    """One module or parameter: how far apart the two sides are."""

    name: str
    cosine: float
    max_abs: float
    relative_l2: float
    tolerance: float

    @property
    def share(self) -> float:
        """Of the tolerance that is used up; above one it diverges."""
        return self.relative_l2 / self.tolerance

    @property
    def diverges(self) -> bool:
        """Whether it is beyond its tolerance, or not a number."""
        return not self.relative_l2 <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignmentPart:
    """Forward or backward: its rows in the order of execution."""

    heading: str
    rows: Sequence[AlignmentRow]


def write_alignment_page(
    path: Path,
    *,
    model: str,
    sides: tuple[str, str],
    batch: str,
    parts: Sequence[AlignmentPart],
    notes: Sequence[str] = (),
    losses: Sequence[tuple[int, float, float]] = (),
) -> None:
    """Write the page of two dumps, of one `model` or of those that `sides` name.

    `losses` are those of training: step, A's, B's.
    """
    page = alignment_page(
        model=model, sides=sides, batch=batch, parts=parts, notes=notes, losses=losses
    )
    page.write(path)


def alignment_page(
    *,
    model: str,
    sides: tuple[str, str],
    batch: str,
    parts: Sequence[AlignmentPart],
    notes: Sequence[str] = (),
    losses: Sequence[tuple[int, float, float]] = (),
) -> Page:
    """Return the page of two dumps."""
    rows = [row for part in parts for row in part.rows]
    summary = Section(id="summary", heading="", body=tiles_html(_tiles(parts)) + notes_html(notes))
    return Page(
        title=f"{f'{model}: ' if model else ''}{sides[0]} beside {sides[1]}",
        subtitle=batch,
        sections=(
            summary,
            *([loss_section(sides, losses)] if losses else []),
            *(_section(part, _first(rows)) for part in parts if part.rows),
        ),
        footer="Made by tutti. This file is complete in itself; it works offline.",
    )


def _first(rows: Sequence[AlignmentRow]) -> AlignmentRow | None:
    return next((row for row in rows if row.diverges), None)


def _tiles(parts: Sequence[AlignmentPart]) -> list[Tile]:
    rows = [row for part in parts for row in part.rows]
    where = {id(row): part.heading for part in parts for row in part.rows}
    first = _first(rows)
    furthest = max(rows, key=lambda row: _or_infinite(row.relative_l2))
    nearest = max(rows, key=lambda row: _or_infinite(row.share))
    unlike = min(rows, key=lambda row: row.cosine if not math.isnan(row.cosine) else -math.inf)
    apart = sum(row.diverges for row in rows)

    def place(row: AlignmentRow) -> str:
        heading = "" if row.name.startswith("step-") else f"{where[id(row)]}: "
        return f"{heading}{row.name}"

    return [
        Tile(
            "First to diverge",
            first.name if first else "none",
            f"{where[id(first)]}, in the order of execution"
            if first
            else f"all {len(rows):,} agree",
            alarm=first is not None,
        ),
        Tile("Diverging", f"{apart:,} of {len(rows):,}", "tensors", alarm=apart > 0),
        Tile("Largest distance", f"{furthest.relative_l2:.2g}", f"relative L2; {place(furthest)}"),
        Tile(
            "Most of its tolerance",
            _share_text(nearest.share),
            f"relative L2 {nearest.relative_l2:.2g} of {nearest.tolerance:.0e}; {place(nearest)}",
            alarm=nearest.diverges,
        ),
        Tile("Smallest cosine", f"{unlike.cosine:.6f}", place(unlike)),
    ]


def _or_infinite(value: float) -> float:
    """Return a figure that sorts: what is no number is further away than any."""
    return math.inf if math.isnan(value) else value


def _section(part: AlignmentPart, first: AlignmentRow | None) -> Section:
    columns = (
        Column("tensor", kind="name"),
        Column("of its tolerance", detail="relative L2 ÷ tolerance"),
        Column("relative L2", figures=True, detail="‖a − b‖ ÷ max(‖a‖, ‖b‖)"),
        Column("tolerance", figures=True),
        Column("max abs", figures=True, detail="the largest difference of two numbers"),
        Column("cosine", figures=True),
    )
    rows = [_row(row, first=row is first) for row in part.rows]
    return Section(
        id="-".join(part.heading.lower().split()),
        heading=part.heading,
        intro="In the order of execution. Relative L2 is ‖a − b‖ ÷ max(‖a‖, ‖b‖); the bar is full "
        "when it reaches the tolerance, which is what the number format explains.",
        body=table_html(columns, rows, most=MOST_ROWS, cards=False),
    )


def _row(row: AlignmentRow, *, first: bool) -> Row:
    mark = "first to diverge" if first else "diverges" if row.diverges else ""
    return Row(
        cells=(
            Html(_breakable(row.name) + (f'<span class="mark">{mark}</span>' if mark else "")),
            meter_html(
                _or_infinite(row.share), _share_text(row.share), color="forward", alarm=row.diverges
            ),
            _figure(row.relative_l2),
            f"{row.tolerance:.0e}",
            _figure(row.max_abs),
            f"{row.cosine:.8f}",
        ),
        strong=first,
    )


def _breakable(name: str) -> str:
    """Return a tensor's name as HTML that breaks after its dots."""
    return escape(name).replace(".", ".<wbr>").replace("/", "/<wbr>")


def _figure(value: float) -> str:
    return "0" if value == 0 else "no number" if math.isnan(value) else f"{value:.2e}"


def _share_text(share: float) -> str:
    """Return "12 %", or how many times the tolerance; little is not nothing."""
    if math.isnan(share):
        return "no number"
    if share > 1:
        return f"{share:.3g} ×"
    return "0 %" if share == 0 else "< 1 %" if share < 0.01 else f"{100 * share:.0f} %"
