"""The page of an alignment, opened in headless Chromium."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_report_page import BROWSER, browse, console
from tutti.report.alignment import AlignmentPart, AlignmentRow, write_alignment_page

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no chromium, chromium-browser or google-chrome on the PATH"
)


def row(name: str, distance: float) -> AlignmentRow:
    return AlignmentRow(name=name, cosine=0.999, max_abs=2e-4, relative_l2=distance, tolerance=1e-5)


def test_the_page_says_where_two_sides_part(tmp_path: Path) -> None:
    forward = [row("1.attention", 1e-7), row("1.<mlp>", 2e-3), row("1", float("nan"))]
    path = tmp_path / "page.html"
    write_alignment_page(
        path,
        model="tiny",
        sides=("hf float32 on cpu", "tutti float32 on cpu"),
        batch="2 sequences of 32 tokens, seed 0",
        parts=(
            AlignmentPart(heading="Forward", rows=forward),
            AlignmentPart(heading="Gradients", rows=[row("1.mlp.up.weight", 1e-4)]),
        ),
        notes=["only in A: forward/2"],
    )
    dom, log = browse(path, tmp_path)
    assert console(log) == []
    assert dom.count("first to diverge") == 1
    at = dom.index("first to diverge")
    assert "1.<wbr>&lt;mlp&gt;" in dom[at - 200 : at]
    assert "3 of 4" in dom
    assert "only in A: forward/2" in dom
    assert dom.count('<tr class="strong">') == 1
