"""Calls of rotary and of the activations."""

from __future__ import annotations

from typing import Any

from tutti.accelerator.conformance.case import Case, Layout, Values
from tutti.models.parts import Activation

PLAIN = tuple(kind for kind in Activation if kind is not Activation.CLAMPED_SWIGLU)


def _rotary(
    name: str,
    shape: tuple[int, int, int],
    pairs: int,
    *,
    interleaved: bool = False,
    layout: Layout = "contiguous",
    wide: bool = False,
) -> Case:
    table = Values((shape[0], pairs), 0.25, trained=False, wide=wide)  # within ±1, as cosines are
    return Case(
        "rotary", name, (Values(shape, layout=layout), table, table), {"interleaved": interleaved}
    )


def _split_rotary(
    name: str,
    shape: tuple[int, int, int],
    kv_heads: int,
    pairs: int,
    *,
    interleaved: bool = False,
    layout: Layout = "contiguous",
    norms: dict[str, Any] | None = None,
) -> Case:
    table = Values((shape[0], pairs), 0.25, trained=False, wide=True)
    options: dict[str, Any] = {
        "heads": shape[1] - 2 * kv_heads, "kv_heads": kv_heads, "interleaved": interleaved
    }  # fmt: skip
    if norms is not None:
        weight = Values(shape[-1:])
        options |= {"query_norm": weight, "key_norm": weight, "eps": 1e-6, **norms}
    return Case("split_rotary", name, (Values(shape, layout=layout), table, table), options)


def _activation(
    operator: str,
    kind: Activation,
    name: str,
    shape: tuple[int, ...],
    layout: Layout = "contiguous",
    scale: float = 1.0,
) -> Case:
    exponent = 3 * scale  # three deviations out
    return Case(
        operator,
        f"{kind}, {name}",
        (Values(shape, scale, layout=layout),),
        {"kind": kind},
        terms=int(exponent**2),
    )


def _narrow(kind: Activation, name: str, shape: tuple[int, ...]) -> Case:
    return Case(
        "narrow_gated_activation",
        f"{kind}, {name}",
        (Values(shape, trained=False),),
        {"kind": kind},
        terms=9,
    )


CASES = (
    *(_narrow(kind, "odd width", (5, 66)) for kind in Activation),
    _narrow(Activation.SILU, "1 token", (1, 128)),
    _narrow(Activation.SILU, "no tokens", (0, 64)),
    _narrow(Activation.SILU, "wide", (3, 2 * 14_336)),
    _rotary("1 token", (1, 4, 64), 32),
    _rotary("odd heads", (7, 5, 128), 64),
    _rotary("part of the head", (9, 3, 80), 16),
    _rotary("head of 96", (9, 3, 96), 48),
    _rotary("interleaved", (9, 3, 64), 32, interleaved=True),
    _rotary("interleaved part", (9, 2, 72), 10, interleaved=True),
    _rotary("some heads of more", (11, 4, 64), 32, layout="heads"),
    _rotary("sliced heads", (11, 4, 64), 32, layout="sliced"),
    _rotary("float32 tables", (11, 4, 64), 32, wide=True),
    _rotary("no tokens", (0, 4, 64), 32),
    _split_rotary("1 token", (1, 6, 64), 1, 32),
    _split_rotary("grouped", (7, 16, 128), 3, 64),
    _split_rotary("as many keys as queries", (9, 9, 96), 3, 48),
    _split_rotary("part of the head", (9, 5, 80), 1, 16),
    _split_rotary("interleaved", (9, 8, 64), 2, 32, interleaved=True),
    _split_rotary("sliced heads", (11, 8, 64), 2, 32, layout="sliced"),
    _split_rotary("no tokens", (0, 6, 64), 1, 32),
    _split_rotary("norms, 1 token", (1, 6, 64), 1, 32, norms={}),
    _split_rotary("norms, grouped", (67, 16, 128), 3, 64, norms={}),
    _split_rotary("norms, head of 96", (9, 9, 96), 3, 48, norms={}),
    _split_rotary("norms, offset", (9, 6, 256), 1, 128, norms={"unit_offset": True}),
    _split_rotary("norms, part of the head", (9, 5, 80), 1, 16, norms={}),
    _split_rotary("norms, interleaved", (9, 8, 64), 2, 32, interleaved=True, norms={}),
    _split_rotary("norms, queries alone", (9, 8, 64), 2, 32, norms={"key_norm": None}),
    _split_rotary("norms, sliced heads", (300, 8, 64), 2, 32, layout="sliced", norms={}),
    *(_activation("activation", kind, "odd width", (5, 33)) for kind in PLAIN),
    *(_activation("activation", kind, "far out", (5, 64), scale=40.0) for kind in PLAIN),
    _activation("activation", Activation.SILU, "1 token", (1, 64)),
    _activation("activation", Activation.SILU, "sliced", (9, 64), "sliced"),
    _activation("activation", Activation.GELU_TANH, "no tokens", (0, 64)),
    _activation("activation", Activation.GELU, "large", (257, 515)),
    *(_activation("gated_activation", kind, "odd width", (5, 66)) for kind in Activation),
    *(_activation("gated_activation", kind, "far out", (5, 64), scale=12.0) for kind in Activation),
    _activation("gated_activation", Activation.SILU, "1 token", (1, 128)),
    _activation("gated_activation", Activation.SILU, "wide", (3, 2 * 14_336)),
    _activation("gated_activation", Activation.SILU, "batch of sequences", (2, 5, 96)),
    _activation("gated_activation", Activation.SILU, "sliced", (9, 96), "sliced"),
    _activation("gated_activation", Activation.GELU_TANH, "large", (257, 1030)),
    _activation("gated_activation", Activation.SILU, "no tokens", (0, 64)),
    Case(
        "gated_activation",
        "clamped_swiglu, other limits",
        (Values((7, 64), 2.0),),
        {"kind": Activation.CLAMPED_SWIGLU, "alpha": 1.5, "limit": 2.0},
    ),
)
