"""The losses of two training runs: one drawing with a line for each, and a table."""

from __future__ import annotations

from collections.abc import Sequence

from tutti.report.curves import Curve, curves_html
from tutti.report.page import Section
from tutti.report.tables import Column, Row, table_html


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
    # B is dashed: where the runs agree, A shows through it
    curves = [
        Curve(name="A", color="forward", points=[(step, a) for step, a, _ in losses]),
        Curve(name="B", color="alarm", points=[(step, b) for step, _, b in losses], dashed=True),
    ]
    return curves_html("Loss", curves, text=lambda value: f"{value:.4g}")
