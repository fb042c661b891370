"""The losses of two training runs: one drawing with a line for each, and a table."""

from __future__ import annotations

import html
from collections.abc import Sequence

from tutti.report.page import Section
from tutti.report.tables import Column, Row, table_html

WIDTH, HEIGHT, MARGIN = 720.0, 220.0, 12.0
# B is dashed: where the runs agree, A shows through it
_STROKES = (
    "stroke:var(--forward);stroke-width:3.5",
    "stroke:var(--alarm);stroke-width:1.5;stroke-dasharray:7 5",
)


def loss_section(sides: tuple[str, str], losses: Sequence[tuple[int, float, float]]) -> Section:
    """Return the losses of A and B over the steps: (step, A's, B's)."""
    columns = (
        Column("step", figures=True),
        Column("loss of A", figures=True),
        Column("loss of B", figures=True),
        Column("B − A", figures=True),
    )
    rows = [
        Row(cells=(str(step), f"{a:.7g}", f"{b:.7g}", f"{b - a:+.1e}")) for step, a, b in losses
    ]
    return Section(
        id="losses",
        heading="Losses",
        intro=f"A (solid) is {sides[0]}; B (dashed) is {sides[1]}.",
        body=_drawing(losses) + table_html(columns, rows),
    )


def _drawing(losses: Sequence[tuple[int, float, float]]) -> str:
    lowest = min(min(a, b) for _, a, b in losses)
    highest = max(max(a, b) for _, a, b in losses)
    first, last = losses[0][0], losses[-1][0]

    def point(step: int, loss: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * (step - first) / max(last - first, 1)
        share = (highest - loss) / (highest - lowest) if highest > lowest else 0.5
        return f"{x:.1f},{MARGIN + (HEIGHT - 2 * MARGIN) * share:.1f}"

    lines = "".join(
        f'<polyline fill="none" style="{stroke}" '
        f'points="{" ".join(point(row[0], row[side]) for row in losses)}"/>'
        for side, stroke in enumerate(_STROKES, 1)
    )
    told = html.escape(f"losses of two runs from {highest:.4g} to {lowest:.4g}")
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{told}" '
        f'style="width:100%;max-width:{WIDTH:g}px">{lines}</svg>'
    )
