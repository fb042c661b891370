"""The page of two training runs: both loss curves, and a table for each step."""

from __future__ import annotations

import re

import pytest

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


def test_equal_losses_are_drawn_and_a_single_step_is_no_curve() -> None:
    assert page([(1, 5.0, 5.0), (2, 5.0, 5.0)]).count("<polyline") == 2
    alone = page([(0, 5.0, 4.75)])
    assert "<polyline" not in alone
    assert "4.75" in alone


def tile(text: str, name: str) -> tuple[str, str]:
    found = re.search(rf"<dt>{name}</dt><dd>([^<]*)<small>([^<]*)</small>", text)
    assert found is not None
    return found[1], found[2]


@pytest.mark.parametrize("order", [1, -1])
def test_the_largest_distance_is_the_largest(order: int) -> None:
    """Which is not what is nearest to its tolerance: gradients are allowed more than outputs."""
    rows = [
        AlignmentRow(name=name, cosine=cosine, max_abs=1, relative_l2=distance, tolerance=allowed)
        for name, cosine, distance, allowed in (
            ("near its tolerance", 0.9999, 9e-6, 1e-5),
            ("far away", 0.9, 3e-2, 1e-1),
            ("between", 0.8, 1e-2, 1e-1),
        )
    ][::order]
    parts = [AlignmentPart(heading="Forward", rows=rows)]
    text = alignment_page(model="tiny", sides=SIDES, batch="", parts=parts).html()
    assert tile(text, "Largest distance") == ("0.03", "relative L2; Forward: far away")
    value, detail = tile(text, "Most of its tolerance")
    assert (value, "near its tolerance" in detail) == ("90 %", True)
    assert tile(text, "Smallest cosine") == ("0.800000", "Forward: between")


def test_what_is_no_number_is_furthest_away() -> None:
    rows = [
        AlignmentRow(name=name, cosine=value, max_abs=value, relative_l2=value, tolerance=1e-5)
        for name, value in (("whole", 0.5), ("broken", float("nan")), ("last", 0.25))
    ]
    parts = [AlignmentPart(heading="Forward", rows=rows)]
    text = alignment_page(model="tiny", sides=SIDES, batch="", parts=parts).html()
    for name in ("Largest distance", "Most of its tolerance", "Smallest cosine"):
        assert "broken" in tile(text, name)[1]
