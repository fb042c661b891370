"""Calls of attention: masks, caps, sinks, biases, head shapes, and segments cut in every way."""

from __future__ import annotations

from typing import Any

from tutti.accelerator.conformance.case import Case, Layout, Values
from tutti.accelerator.segments import Segments

WHOLE = Segments.of_lengths((37,))
PACKED = Segments.of_lengths((1, 17, 64, 5))
TAIL = Segments((9,), (23,), (0,))  # the last part of a sequence, as context parallelism cuts it
DECODE = Segments((1, 1, 1), (5, 19, 1), (0, 5, 24))  # a new token of each of three sequences
OVERLAP = Segments((6, 4), (10, 14), (0, 2))  # two parts of one sequence, keys shared
GAPS = Segments((3, 2), (4, 6), (1, 9))  # keys that nobody looks at between and around
MIXED = Segments((4, 1, 11), (4, 12, 11), (0, 4, 16))  # prefill, decode, prefill


def _case(
    name: str,
    segments: Segments = WHOLE,
    heads: tuple[int, int] = (4, 4),
    dims: tuple[int, int] = (64, 64),
    *,
    operator: str = "attention",
    layout: Layout = "contiguous",
    sinks: bool = False,
    key_bias: bool = False,
    keys: int | None = None,
    **options: Any,
) -> Case:
    last = max(s + n for s, n in zip(segments.key_starts, segments.keys, strict=True))
    num_keys = keys or last
    if sinks:
        options["sinks"] = Values((heads[0],))
    if key_bias:
        options["key_bias"] = Values((heads[0], num_keys), trained=False, wide=True)
    width, value_width = dims
    group = heads[0] // heads[1]
    return Case(
        operator,
        name,
        (
            Values((segments.num_queries, heads[0], width), layout=layout),
            Values((num_keys, heads[1], width), layout=layout),
            Values((num_keys, heads[1], value_width), layout=layout),
            segments,
        ),
        {"scale": width**-0.5, **options},
        terms=max(width, value_width, max(segments.keys), group * max(segments.queries)),
    )


def _lse(name: str, segments: Segments = WHOLE, **options: Any) -> Case:
    return _case(name, segments, operator="attention_with_lse", **options)


CASES = (
    _case("1 token", Segments.of_lengths((1,))),
    _case("one sequence"),
    _case("equal sequences", Segments.batch(3, 19)),
    _case("tile edges", Segments.of_lengths((129,)), heads=(2, 1)),
    _case("several tiles", Segments.of_lengths((300,)), heads=(2, 2)),
    _case("packed sequences", PACKED, heads=(4, 2)),
    _case("many short sequences", Segments.of_lengths((1, 2, 3) * 22), heads=(2, 2)),
    _case("grouped queries", heads=(6, 2)),
    _case("one key head", heads=(5, 1)),
    _case("head of 32", dims=(32, 32)),
    _case("head of 80", dims=(80, 80)),
    _case("head of 128", dims=(128, 128), heads=(4, 1)),
    _case("head of 256", dims=(256, 256), heads=(2, 1)),
    _case("odd head", dims=(40, 40)),
    _case("latent, small", PACKED, dims=(24, 16)),
    _case("latent, 192 and 128", dims=(192, 128), heads=(3, 3)),
    _case("latent, several tiles", Segments.batch(2, 160), dims=(192, 128), heads=(2, 2)),
    _case("head of 256, several tiles", Segments.batch(2, 160), dims=(256, 256), heads=(4, 2)),
    _case("not causal", causal=False),
    _case("not causal, packed", PACKED, causal=False),
    _case("tail of a sequence", TAIL, heads=(4, 2)),
    _case("tail of a sequence, not causal", TAIL, causal=False),
    _case("one new token each", DECODE, heads=(8, 2)),
    _case("overlapping keys", OVERLAP),
    _case("unused keys", GAPS, keys=21),
    _case("prefill and decode together", MIXED, heads=(4, 2)),
    _case("window", window=8),
    _case("window of one", window=1),
    _case("window, not causal", window=8, causal=False),
    _case("window beyond the length", window=4096),
    _case("window, packed", PACKED, window=16, heads=(4, 2)),
    _case("window, tail", TAIL, window=6),
    _case("window, new tokens", DECODE, window=7),
    _case("window, several tiles", Segments.of_lengths((300,)), heads=(2, 1), window=100),
    _case("chunks", window=8, window_kind="chunked"),
    _case("chunks, packed", PACKED, window=16, window_kind="chunked"),
    _case("chunks beyond the length", window=4096, window_kind="chunked"),
    _case("soft cap", soft_cap=2.0),
    _case("soft cap and window", PACKED, heads=(4, 2), soft_cap=20.0, window=12),
    _case("sinks", sinks=True, heads=(4, 2)),
    _case("sinks and window, packed", PACKED, sinks=True, window=16, heads=(4, 1)),
    _case("key bias", key_bias=True),
    _case("key bias, packed", PACKED, key_bias=True, heads=(4, 2)),
    _case("other scale", scale=0.3),
    _case("some heads of more", PACKED, layout="heads", heads=(4, 2)),
    _case("sliced heads", layout="sliced"),
    _lse("1 token", Segments.of_lengths((1,))),
    _lse("one sequence"),
    _lse("packed sequences", PACKED, heads=(4, 2)),
    _lse("tail of a sequence", TAIL),
    _lse("not causal", Segments((9,), (23,), (0,)), causal=False, heads=(4, 1)),
    _lse("fewer keys than queries", Segments((9, 1), (2, 5), (4, 0), across=True), causal=False),
    _lse("latent", dims=(24, 16)),
    _lse("some heads of more", layout="heads"),
)
