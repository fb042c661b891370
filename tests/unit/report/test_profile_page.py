"""The page of a profile: what its cells say."""

from __future__ import annotations

import re

from tests.support.measured import SHAPES, measured_profile
from tutti.hardware.chip import Dtype
from tutti.hardware.profile import LinkFigure, Profile
from tutti.report.heat import Cell, heat_html
from tutti.report.profile import profile_page


def test_shares_are_of_the_best_product():
    html = profile_page(measured_profile()).html()
    products = html[html.index('id="products-bf16"') : html.index('id="attention-bf16"')]
    cells = re.findall(r'style="--share:(\d+)%"[^>]*>(\d+)<', products)
    assert len(cells) == 3 * len(SHAPES["linear"])
    assert max(int(text) for _, text in cells) == 100
    assert all(int(share) == round(int(text) ** 2 / 100) or abs(
        int(share) - int(text) ** 2 / 100) <= 2 for share, text in cells)  # fmt: skip
    assert "4,096 → 16,384" in products


def test_a_profile_of_links_alone_is_a_page_too():
    links = (
        LinkFigure(kind="memory", latency_s=1e-6, bandwidth=4e12),
        LinkFigure(kind="host_to_device", latency_s=1e-5, bandwidth=55e9),
    )
    bare = Profile(chip="H200", date="2026-01-31", origin="x", launch_floor_s=2e-6, links=links)
    html = profile_page(bare).html()
    assert "55 GB/s" in html
    assert "heat" not in html[html.index("<body>") :]


def test_an_operator_that_we_do_not_know_is_listed(tmp_path):
    whole = measured_profile(dtype=Dtype.FP32, operators=("linear", "attention"))
    odd = whole.operators[0].__class__(
        operator="matmul", dtype=Dtype.FP32, shape=(2, 2, 2), seconds=1.0
    )
    page = profile_page(
        Profile(chip="X", date="2026-01-31", origin="x", launch_floor_s=0,
                operators=(*whole.operators, odd))
    )  # fmt: skip
    assert "matmul" in page.html()


def test_many_rows_are_cut_and_said():
    rows = [(str(n), {"a": Cell(0.5, "50")}) for n in range(5)]
    assert "… and 2 more rows" in heat_html("corner", ["a", "b"], rows, most=3)
