"""The page of two training runs: both loss curves, and a table for each step."""

from __future__ import annotations

import re

from tutti.report.alignment import AlignmentPart, AlignmentRow, alignment_page

SIDES = ("plan:a.json float32 on 2 ranks of pair", "plan:b<.json float32 on 2 ranks of pair")


def page(losses: list[tuple[int, float, float]]) -> str:
    rows = [
        AlignmentRow(
            name=f"step-{step}/loss", cosine=1, max_abs=0, relative_l2=1e-6 * step, tolerance=1e-5
        )
        for step, _, _ in losses
    ]
    parts = [AlignmentPart(heading=f"Step {n}", rows=[row]) for n, row in enumerate(rows, 1)]
    return alignment_page(
        model="tiny", sides=SIDES, batch="2 steps", parts=parts, losses=losses
    ).html()


def test_both_losses_are_drawn_to_one_scale() -> None:
    text = page([(1, 5.0, 5.0), (2, 4.0, 4.5), (3, 3.0, 4.0)])
    lines = re.findall(r'points="([^"]+)"', text)
    heights = [[float(point.split(",")[1]) for point in line.split()] for line in lines]
    assert len(lines) == 2
    assert heights[0][0] == heights[1][0] < heights[1][2] < heights[0][2]
    assert heights[0][1] == heights[1][2]  # both are 4
    assert "plan:b&lt;.json" in text
    assert 'id="step-1"' in text
    assert 'id="step-3"' in text


def test_a_single_step_and_equal_losses_are_drawn() -> None:
    assert page([(1, 5.0, 5.0)]).count("<polyline") == 2
