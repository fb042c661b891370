"""The losses of two training runs: one drawing with a line for each, and a table."""

from __future__ import annotations

from collections.abc import Sequence

from tutti.report.curves import Curve, curves_html
from tutti.report.page import Section
from tutti.report.tables import Column, Row, table_html


def loss_section(sides: tuple[str, str], losses: Sequence[tuple[int, float, float]]) -> Section:
    """Return the losses of A and B over the steps: (step, A's, B's)."""
    several = len(losses) > 1
    columns = (
        *([Column("step", figures=True)] if several else []),
        Column("loss of A", figures=True),
        Column("loss of B", figures=True),
        Column("B − A", figures=True),
    )
    rows = [
        Row(cells=(*([str(step)] if several else []), f"{a:.7g}", f"{b:.7g}", _difference(b - a)))
        for step, a, b in losses
    ]
    return Section(
        id="losses",
        heading="Losses",
        intro=f"A (solid) is {sides[0]}; B (dashed) is {sides[1]}."
        if several
        else f"A is {sides[0]}; B is {sides[1]}.",
        body=_drawing(losses) + table_html(columns, rows),
    )


def _difference(value: float) -> str:
    return "0" if value == 0 else f"{value:+.1e}"


def _drawing(losses: Sequence[tuple[int, float, float]]) -> str:
    if len(losses) < 2:
        return ""  # one step is no curve
    # B is dashed: where the runs agree, A shows through it
    curves = [
        Curve(name="A", color="forward", points=[(step, a) for step, a, _ in losses]),
        Curve(name="B", color="alarm", points=[(step, b) for step, _, b in losses], dashed=True),
    ]
    drawn = curves_html("Loss over steps", curves, text=lambda value: f"{value:.7g}")
    return f'<div class="curves">{drawn}</div>'
