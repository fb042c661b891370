from __future__ import annotations

import pytest

from tutti import units
from tutti.errors import hint, nearest
from tutti.units import many


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("80 GiB", "bytes", 80 * 2**30),
        ("80GB", "bytes", 80e9),
        ("200 Gb/s", "bytes/s", 25e9),
        ("200Gbps", "bytes/s", 25e9),
        ("2.039 TB/s", "bytes/s", 2.039e12),
        ("312 TFLOP/s", "flop/s", 312e12),
        ("5 us", "s", 5e-6),
        ("1.5 ms", "s", 1.5e-3),
        ("0.4 kW", "W", 400),
        ("1e9", "bytes", 1e9),
    ],
)
def test_quantities(text, dimension, value):
    assert units.parse(text, dimension) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "dimension", "message"),
    [
        ("lots", "bytes", "write it like '80 GiB'"),
        ("80 Gb", "bytes", "unknown unit 'Gb'"),
        ("200 GiB", "bytes/s", "unknown unit 'GiB'"),
        ("", "s", "write it like '5 us'"),
        ("1e999 GB", "bytes", "not a finite number"),
    ],
)
def test_wrong_quantities_name_the_remedy(text, dimension, message):
    with pytest.raises(ValueError, match=message):
        units.parse(text, dimension)


def test_formatting():
    assert units.bytes_text(80 * 2**30) == "80.0 GiB"
    assert units.bytes_text(12) == "12 B"
    assert units.rate_text(25e9) == "25 GB/s"
    assert units.flops_text(989.4e12) == "989.4 TFLOP/s"
    assert units.count_text(6_738_415_616) == "6.738 B"
    assert units.seconds_text(12.3e-6) == "12.3 µs"
    assert units.seconds_text(0.25) == "250 ms"
    assert units.seconds_text(180) == "3 min 0 s"
    assert units.seconds_text(3299.9) == "55 min 0 s"
    assert units.seconds_text(0.0) == "0 s"


def test_nearest_names():
    assert nearest("A801", ["A800", "H100"]) == "A800"
    assert nearest("a800", ["A800", "H100"]) == "A800"
    assert nearest("zzz", ["A800"]) is None
    assert hint("zzz", ["b", "a"]) == "known: a, b"
    assert hint("x", []) == "none are known here"


def test_one_is_no_plural():
    assert [many(n, "chip") for n in (0, 1, 2, 1024)] == [
        "0 chips",
        "1 chip",
        "2 chips",
        "1,024 chips",
    ]
    assert [many(n, "strategy", "strategies") for n in (1, 2)] == ["1 strategy", "2 strategies"]
