"""The page of an alignment: two runs of one model, module by module, and where they part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tutti.report.loss_curves import loss_section
from tutti.report.page import Page, Section
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
    """Write the page of two dumps; `losses` are those of training: step, A's, B's."""
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
    summary = Section(id="summary", heading="", body=tiles_html(_tiles(rows)) + notes_html(notes))
    return Page(
        title=f"{model}: {sides[0]} beside {sides[1]}",
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


def _tiles(rows: Sequence[AlignmentRow]) -> list[Tile]:
    first = _first(rows)
    worst = max(rows, key=lambda row: row.share if row.share == row.share else float("inf"))
    apart = sum(row.diverges for row in rows)
    return [
        Tile(
            "First to diverge",
            first.name if first else "none",
            "in the order of execution" if first else f"all {len(rows):,} agree",
            alarm=first is not None,
        ),
        Tile("Diverging", f"{apart:,} of {len(rows):,}", "modules and gradients", alarm=apart > 0),
        Tile("Largest distance", f"{worst.relative_l2:.2g}", f"relative L2, {worst.name}"),
        Tile("Smallest cosine", f"{min(row.cosine for row in rows):.6f}", "of all"),
    ]


def _section(part: AlignmentPart, first: AlignmentRow | None) -> Section:
    columns = (
        Column("", kind="whole"),
        Column("module", kind="whole"),
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
        intro="In the order of execution. The bar fills as the distance nears what the number "
        "format explains.",
        body=table_html(columns, rows, most=MOST_ROWS),
    )


def _row(row: AlignmentRow, *, first: bool) -> Row:
    mark = "first to diverge" if first else "diverges" if row.diverges else ""
    share = row.share if row.share == row.share else float("inf")
    text = f"{share:.0%}" if share <= 1 else f"{share:.3g} ×"
    return Row(
        cells=(
            Html(f'<b style="color:var(--alarm)">{mark}</b>') if mark else "",
            row.name,
            meter_html(share, text, color="forward", alarm=row.diverges),
            f"{row.relative_l2:.2e}",
            f"{row.tolerance:.0e}",
            f"{row.max_abs:.2e}",
            f"{row.cosine:.8f}",
        ),
        strong=first,
    )
