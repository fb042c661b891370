"""Calls of attention to pages, and of what writes them."""

from __future__ import annotations

import random
from typing import Any

import torch

from tutti.accelerator.conformance.case import Case, Integers, Layout, Values
from tutti.accelerator.paged_segments import PagedSegments

PAGES = 40
Rows = tuple[tuple[int, ...], tuple[int, ...]]  # queries and keys of each

DECODE: Rows = ((1, 1, 1), (5, 19, 1))
CHUNK: Rows = ((7,), (23,))
MIXED: Rows = ((1, 4, 1, 11, 6), (12, 4, 31, 11, 30))
PADDED: Rows = ((1, 3, 0, 0), (9, 3, 0, 0))
LONG: Rows = ((1, 1, 1, 0), (1201, 5, 700, 0))  # a device may cut their keys into several runs


def _steps(rows: Rows, size: int) -> PagedSegments:
    """Return rows whose pages lie anywhere but in page 0."""
    numbers = random.Random(0).sample(range(1, PAGES), PAGES - 1)
    tables = []
    for length in rows[1]:
        used = -(-length // size)
        tables.append([numbers.pop() for _ in range(used)])
    return PagedSegments.of(*rows, tables, size)


def _case(
    name: str,
    rows: Rows = MIXED,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (64, 64),
    *,
    size: int = 16,
    layout: Layout = "contiguous",
    padding: int = 0,
    sinks: bool = False,
    slopes: bool = False,
    **options: Any,
) -> Case:
    steps = _steps(rows, size)
    if sinks:
        options["sinks"] = Values((heads[0],), trained=False)
    if slopes:
        options["slopes"] = Values((heads[0],), 0.25, trained=False, wide=True, positive=True)
    return Case(
        "paged_attention",
        name,
        (
            Values((steps.num_queries + padding, heads[0], dims[0]), layout=layout, trained=False),
            Values((PAGES, size, heads[1], dims[0]), trained=False),
            Values((PAGES, size, heads[1], dims[1]), trained=False),
            steps,
        ),
        {"scale": dims[0] ** -0.5, **options},
        terms=max(*dims, *rows[1]),
    )


def _latent(
    name: str,
    rows: Rows = MIXED,
    dims: tuple[int, int] = (96, 64),
    *,
    heads: int = 4,
    size: int = 16,
) -> Case:
    steps = _steps(rows, size)
    return Case(
        "latent_attention",
        name,
        (
            Values((steps.num_queries, heads, dims[0]), trained=False),
            Values((PAGES, size, dims[0]), trained=False),
            steps,
        ),
        {"rank": dims[1], "scale": dims[0] ** -0.5},
        terms=max(*dims, *rows[1]),
    )


def _store(name: str, places: tuple[int, ...], dims: tuple[int, int]) -> Case:
    return Case(
        "store_pages",
        name,
        (
            Values((len(places), 2, dims[0]), layout="heads", trained=False),
            Values((len(places), 2, dims[1]), trained=False),
            Values((8, 4, 2, dims[0]), trained=False),
            Values((8, 4, 2, dims[1]), trained=False),
            Integers(places),
        ),
        in_place=True,
    )


def _store_latents(name: str, places: tuple[int, ...], width: int) -> Case:
    return Case(
        "store_latents",
        name,
        (
            Values((len(places), width), layout="sliced", trained=False),
            Values((8, 4, width), trained=False),
            Integers(places),
        ),
        in_place=True,
    )


def _store_heads(
    name: str,
    heads: tuple[int, int] = (4, 2),
    width: int = 64,
    *,
    turned: int | None = None,
    norms: bool = False,
    layout: Layout = "contiguous",
    places: tuple[int, ...] = (5, 31, 4, 16, 0, 9),
    **options: Any,
) -> Case:
    if norms:
        options |= {"query_norm": Values((width,)), "key_norm": Values((width,)), "eps": 1e-6}
    half = (turned or width) // 2
    table = Values((len(places), half), trained=False, wide=True)
    return Case(
        "store_heads",
        name,
        (
            Values((len(places), heads[0] + 2 * heads[1], width), layout=layout, trained=False),
            table,
            table,
            Values((8, 4, heads[1], width), trained=False),
            Values((8, 4, heads[1], width), trained=False),
            Integers(places),
        ),
        {"heads": heads[0], "kv_heads": heads[1], **options},
        terms=width,
        in_place=True,
    )


def _codes(*shape: int, dtype: torch.dtype) -> Integers:
    return Integers(shape=shape, low=-127, high=128, narrow=dtype)


def _quantised(
    name: str,
    rows: Rows = MIXED,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (64, 64),
    *,
    size: int = 16,
    codes: torch.dtype = torch.int8,
    **options: Any,
) -> Case:
    steps = _steps(rows, size)
    scales = Values((PAGES, size, heads[1]), 1 / 64, trained=False, wide=True, positive=True)
    return Case(
        "quantised_paged_attention",
        name,
        (
            Values((steps.num_queries, heads[0], dims[0]), trained=False),
            _codes(PAGES, size, heads[1], dims[0], dtype=codes),
            _codes(PAGES, size, heads[1], dims[1], dtype=codes),
            scales,
            scales,
            steps,
        ),
        {"scale": dims[0] ** -0.5, **options},
        terms=max(*dims, *rows[1]),
    )


def _store_quantised(
    name: str,
    places: tuple[int, ...],
    dims: tuple[int, int],
    codes: torch.dtype = torch.int8,
) -> Case:
    scales = Values((8, 4, 2), trained=False, wide=True, positive=True)
    return Case(
        "store_quantised_pages",
        name,
        (
            Values((len(places), 2, dims[0]), layout="heads", trained=False, zero_rows=True),
            Values((len(places), 2, dims[1]), trained=False),
            _codes(8, 4, 2, dims[0], dtype=codes),
            _codes(8, 4, 2, dims[1], dtype=codes),
            scales,
            scales,
            Integers(places),
        ),
        in_place=True,
    )


CASES = (
    _store_heads("turned"),
    _store_heads("no tokens", places=(), norms=True),
    _store_heads("normed and turned", norms=True),
    _store_heads("neighbours", interleaved=True),
    _store_heads("part of a head", turned=32, norms=True),
    _store_heads("one more than the weight", norms=True, unit_offset=True),
    _store_heads("head of 128", (8, 2), 128, norms=True),
    _store_heads("odd numbers", (5, 1), 40, turned=20),
    _store_heads("some heads of more", layout="heads", norms=True),
    _store("some places", (5, 31, 4, 16, 0), (64, 64)),
    _store("unlike keys and values", (9, 8, 7), (24, 16)),
    _store("odd width", (1, 2, 30), (33, 33)),
    _store("no tokens", (), (64, 64)),
    _store_latents("some places", (5, 31, 4, 16, 0), 96),
    _store_latents("odd width", (5, 31), 33),
    _store_latents("no tokens", (), 64),
    _case("one new token each", DECODE),
    _case("a chunk of a prompt", CHUNK),
    _case("a whole prompt", ((33,), (33,))),
    _case("prefill and decode together"),
    _case("padded rows and tokens", PADDED, padding=3),
    _case("no tokens", ((0, 0), (0, 0))),
    _case("pages of one token", ((1, 5), (7, 9)), size=1),
    _case("pages of 4", ((1, 5, 9), (17, 9, 30)), size=4),
    _case("pages of 64", size=64),
    _case("grouped queries", heads=(6, 2)),
    _case("one key head", heads=(5, 1)),
    _case("as many key heads", heads=(3, 3)),
    _case("head of 128", dims=(128, 128), heads=(4, 1)),
    _case("head of 256", DECODE, dims=(256, 256), heads=(2, 1)),
    _case("odd head", dims=(40, 40)),
    _case("unlike keys and values", dims=(24, 16)),
    _case("window", window=8),
    _case("window of one", window=1),
    _case("window beyond the length", window=4096),
    _case("chunked window", window=8, window_kind="chunked"),
    _case("soft cap", soft_cap=2.0),
    _case("soft cap and window", soft_cap=20.0, window=12),
    _case("sinks", sinks=True),
    _case("sinks and window", sinks=True, window=6, heads=(4, 1)),
    _case("slopes", slopes=True, slopes_factor=0.5),
    _case("rounded slopes", slopes=True, slopes_rounded=True),
    _case("other scale", scale=0.3),
    _case("some heads of more", layout="heads"),
    _case("many rows", ((1,) * 30, tuple(range(1, 16)) * 2)),
    _case("long rows", LONG, size=64, padding=1),
    _case("long rows, sinks and window", LONG, size=64, sinks=True, window=650),
    _case(
        "long rows, chunked window and soft cap",
        LONG,
        (4, 1),
        size=64,
        window=500,
        window_kind="chunked",
        soft_cap=5.0,
    ),
    _case("long rows and chunks", ((1, 40, 1, 3), (990, 600, 64, 400)), size=64),
    _latent("one new token each", DECODE),
    _latent("long rows", LONG, size=64),
    _latent("prefill and decode together"),
    _latent("512 and 64", DECODE, (576, 512), heads=3),
    _latent("odd width", CHUNK, (23, 17)),
    _latent("no tokens", ((0,), (0,))),
    _store_quantised("some places", (5, 31, 4, 16, 0), (64, 64)),
    _store_quantised("floats of 8 bits", (5, 31, 4, 16, 0), (64, 64), torch.float8_e4m3fn),
    _store_quantised("unlike keys and values", (9, 8, 7), (24, 16)),
    _store_quantised("no tokens", (), (64, 64)),
    _quantised("one new token each", DECODE),
    _quantised("a chunk of a prompt", CHUNK),
    _quantised("prefill and decode together"),
    _quantised("no tokens", ((0, 0), (0, 0))),
    _quantised("pages of 4", ((1, 5, 9), (17, 9, 30)), size=4),
    _quantised("unlike keys and values", dims=(24, 16)),
    _quantised("window", window=8),
    _quantised("soft cap", soft_cap=2.0, heads=(6, 2)),
    _quantised("long rows", LONG, size=64),
    _quantised("floats of 8 bits", codes=torch.float8_e4m3fn),
    _quantised(
        "floats of 8 bits, head of 128", DECODE, (4, 1), (128, 128), codes=torch.float8_e4m3fn
    ),
    _quantised("many rows", ((1,) * 30, tuple(range(1, 16)) * 2)),
)
