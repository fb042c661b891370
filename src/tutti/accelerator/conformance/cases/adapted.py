"""Calls of adapters: rows of several, of none, in any order."""

from __future__ import annotations

from tutti.accelerator.conformance.case import Case, Integers, Layout, Values


def _case(
    name: str,
    adapters: tuple[int, ...],
    width: int,
    out: int,
    *,
    rank: int = 8,
    count: int = 3,
    layout: Layout = "contiguous",
    ordered: bool = False,
) -> Case:
    rows = len(adapters)
    together = sorted(range(rows), key=lambda row: adapters[row])
    return Case(
        "adapted_linear",
        name,
        (
            Values((rows, out), trained=False),
            Values((rows, width), layout=layout, trained=False),
            Values((count, rank, width), width**-0.5, trained=False),
            Values((count, out, rank), rank**-0.5, trained=False),
            Integers(adapters),
            *((Integers(tuple(together)),) if ordered else ()),
        ),
        terms=max(width, rank),
    )


CASES = (
    _case("1 token", (1,), 64, 96),
    _case("rows of several adapters and of none", (0, 2, -1, 1, 0, -1, 2, 2, 0), 64, 48),
    _case("no row has one", (-1, -1, -1), 32, 48),
    _case("one adapter", (0,) * 17, 33, 65, count=1, rank=5),
    _case("rank of 64", (1, 0, 1), 128, 96, rank=64, count=2),
    _case("sliced input", (2, -1, 0, 1), 48, 32, layout="sliced"),
    _case("many tokens", (0, 1, -1, 2, 1) * 103, 24, 40, rank=4),
    _case("no tokens", (), 32, 48),
    _case("rows of one adapter together", (2, 0, -1, 1, 0, 2, -1, 1) * 7, 576, 80, ordered=True),
    _case("many tokens, together", (0, 1, -1, 2, 1) * 231, 40, 24, rank=4, ordered=True),
)
