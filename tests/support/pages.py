"""The pages of the README and docs/: their blocks, and what tests call them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")))
FENCE = re.compile(
    r"(?:^<!-- (?P<mark>fails|finds|varies|figures vary) -->\n+)?"
    r"^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def blocks(page: Path) -> Iterator[re.Match[str]]:
    return FENCE.finditer(page.read_text(encoding="utf-8"))


def called(page: Path) -> str:
    return str(page.relative_to(ROOT))


def words(line: str) -> str:
    return " ".join(line.split())
