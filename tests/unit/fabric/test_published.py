"""Published figures beside ours: the table in docs/concepts/network.md is made of these."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tutti.bench.fabric.published import PUBLISHED

PAGE = Path(__file__).parents[3] / "docs" / "concepts" / "network.md"


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_page_says_what_is_computed(name: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    row = re.search(rf"^\| {re.escape(name)} \| ([^|]*) \| ([+−-]?[\d.]+) % \|", text, re.MULTILINE)
    said, ours = PUBLISHED[name]
    assert row is not None
    assert row[1] == said
    assert float(row[2].replace("−", "-")) == pytest.approx(100 * ours(), abs=0.06)
