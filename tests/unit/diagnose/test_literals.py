"""What lines must contain for a pattern to match: never a text that a matching line lacks."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tutti.diagnose.logs.literals import required_literals
from tutti.diagnose.logs.signatures import own_catalog

SIGNATURES = own_catalog().signatures
PATTERNS = [(one, pattern) for one in SIGNATURES for pattern in one.any]


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("abc.*longer", {"longer"}),
        ("(?:fatal|panic): .{3}", {"fatal", "panic"}),
        (r"\berror\b", {"error"}),
        ("[Xx][Ii][Dd] ", {"xid "}),
        (r"E[IJ]\d{4}", {f"e{k}{d}" for k in "ij" for d in range(10)}),
        ("(?:long optional part)?abcd", {"abcd"}),
        ("ab", None),
        (r"\d+ \w+", None),
        ("(?:longest|)x", None),
        ("(?=longest)abc", {"abc"}),
        ("(?:abc)+", {"abc"}),
        ("(?:abc)*", None),
        (r"\.{4,}", {"...."}),
    ],
)
def test_texts_of_a_pattern(pattern: str, texts: set[str] | None) -> None:
    assert required_literals(pattern) == texts


def test_nearly_every_signature_can_be_ruled_out_by_a_text() -> None:
    assert sum(required_literals(pattern) is None for _, pattern in PATTERNS) <= 3


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.data())
def test_every_line_that_matches_has_one(data: st.DataObject) -> None:
    one, pattern = data.draw(st.sampled_from(PATTERNS))
    texts = required_literals(pattern)
    flags = re.IGNORECASE if one.ignore_case else 0
    line = data.draw(st.from_regex(re.compile(pattern, flags | re.ASCII)))
    assert texts is None or any(text in line.lower() for text in texts)
