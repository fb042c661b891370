"""Calls of linear, grouped_linear and embedding."""

from __future__ import annotations

from typing import Any

from tutti.accelerator.conformance.case import Case, Integers, Layout, Values


def _linear(
    name: str,
    rows: tuple[int, ...],
    width: int,
    out: int,
    *,
    bias: bool = False,
    layout: Layout = "contiguous",
    weight_layout: Layout = "contiguous",
    later: bool = False,
    summed: bool = False,
    operator: str = "linear",
) -> Case:
    x = Values((*rows, width), layout=layout)
    weight = Values((out, width), width**-0.5, layout=weight_layout)
    return Case(
        operator,
        name,
        (x, weight, Values((out,)) if bias else None),
        terms=max(width, out, *rows, 1),
        later=later,
        summed=summed,
    )


def _narrow(name: str, rows: tuple[int, ...], width: int, out: int, **options: Any) -> Case:
    return _linear(name, rows, width, out, operator="narrow_linear", **options)


def _grouped(
    name: str,
    counts: tuple[int, ...],
    width: int,
    out: int,
    *,
    bias: bool = False,
    layout: Layout = "contiguous",
    later: bool = False,
    summed: bool = False,
    operator: str = "grouped_linear",
) -> Case:
    experts = len(counts)
    return Case(
        operator,
        name,
        (
            Values((sum(counts), width), layout=layout),
            Values((experts, out, width), width**-0.5),
            Integers(counts),
            Values((experts, out)) if bias else None,
        ),
        terms=max(width, out, *counts),
        later=later,
        summed=summed,
    )


def _narrow_grouped(
    name: str, counts: tuple[int, ...], width: int, out: int, **options: Any
) -> Case:
    return _grouped(name, counts, width, out, operator="narrow_grouped_linear", **options)


CASES = (
    _linear("1 token, ragged, bias", (1,), 1040, 50, bias=True),
    _linear("1 token", (1,), 64, 96),
    _linear("odd widths, bias", (17,), 33, 65, bias=True),
    _linear("batch of sequences", (2, 9), 40, 24, bias=True),
    _linear("long sums", (3,), 4096, 16),
    _linear("many tokens", (515,), 24, 40),
    _linear("sliced input", (19,), 48, 32, layout="sliced"),
    _linear("transposed weight", (19,), 48, 32, weight_layout="transposed"),
    _linear("no tokens", (0,), 32, 48, bias=True),
    _linear("weight gradient later", (21,), 32, 48, later=True),
    _linear("weight and bias gradient later", (2, 11), 33, 47, bias=True, later=True),
    _linear("gradients added up", (21,), 32, 48, bias=True, later=True, summed=True),
    _narrow("1 token", (1,), 64, 96),
    _narrow("batch of sequences, bias", (2, 9), 48, 32, bias=True),
    _narrow("long rows", (5,), 4112, 16),
    _narrow("many tokens", (515,), 32, 144),
    _narrow("no tokens", (0,), 32, 48, bias=True),
    _narrow("odd widths", (17,), 33, 65),
    _narrow("sliced input", (19,), 48, 32, layout="sliced"),
    _narrow("weight and bias gradient later", (2, 11), 32, 48, bias=True, later=True),
    _narrow("tokens of whole tiles", (3, 64), 96, 80, bias=True),
    _narrow("weight gradient later, whole tiles", (144,), 64, 48, later=True),
    _narrow("gradients added up", (32,), 32, 48, later=True, summed=True),
    _grouped("empty experts", (3, 0, 5, 0, 1), 32, 48),
    _grouped("first and last empty, bias", (0, 7, 0), 24, 33, bias=True),
    _grouped("one expert", (13,), 32, 16),
    _grouped("odd widths", (4, 1, 9), 33, 65),
    _grouped("unequal loads", (1, 130, 17, 64), 64, 32),
    _grouped("no tokens", (0, 0, 0), 32, 16, bias=True),
    _grouped("sliced input", (5, 0, 6), 32, 32, layout="sliced"),
    _grouped("weight gradient later", (5, 0, 6), 32, 24, later=True),
    _grouped("weight and bias gradient later", (2, 3, 0), 16, 24, bias=True, later=True),
    _grouped("gradients added up", (5, 0, 6), 32, 24, later=True, summed=True),
    _narrow_grouped("empty experts", (3, 0, 5, 0, 1), 32, 48),
    _narrow_grouped("first and last empty, bias", (0, 7, 0), 48, 32, bias=True),
    _narrow_grouped("odd widths", (4, 1, 9), 33, 65),
    _narrow_grouped("unequal loads", (1, 130, 17, 64), 64, 32),
    _narrow_grouped("weight gradient later", (5, 0, 6), 32, 64, later=True),
    _narrow_grouped("gradients added up", (5, 0, 6), 32, 16, later=True, summed=True),
    Case("embedding", "1 token", (Integers((5,)), Values((11, 32)))),
    Case(
        "embedding",
        "repeated and negative tokens",
        (Integers((3, -1, 3, 0, 10, -7, 3)), Values((11, 33))),
        terms=3,
    ),
    Case("embedding", "one token often", (Integers((2,) * 257), Values((4, 24))), terms=257),
    Case(
        "embedding",
        "large table",
        (Integers(shape=(64,), low=0, high=32_003), Values((32_003, 16))),
        terms=4,
    ),
    Case("embedding", "no tokens", (Integers((), (0,)), Values((11, 32)))),
    Case(
        "embedding",
        "gradient later, one token often",
        (Integers((2,) * 257), Values((4, 24))),
        terms=257,
        later=True,
    ),
    Case(
        "embedding",
        "gradients added up",
        (Integers((3, -1, 3, 0, 10, -7, *[3] * 130)), Values((11, 33))),
        terms=132,
        later=True,
        summed=True,
    ),
)
