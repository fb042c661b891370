"""Calls of the output head with its cross-entropy."""

from __future__ import annotations

from typing import Any

from tutti.accelerator.conformance.case import Case, Integers, Layout, Values


def _case(
    name: str,
    targets: Integers,
    tokens: int,
    width: int,
    vocabulary: int,
    *,
    layout: Layout = "contiguous",
    bias: bool = False,
    weighted: bool = False,
    **options: Any,
) -> Case:
    if bias:
        options["bias"] = Values((vocabulary,))
    if weighted:
        options["token_weights"] = Values((tokens,), trained=False, wide=True, positive=True)
    return Case(
        "linear_cross_entropy",
        name,
        (Values((tokens, width), layout=layout), Values((vocabulary, width), width**-0.5), targets),
        options,
        terms=max(width, vocabulary, tokens),
    )


def _drawn(tokens: int, vocabulary: int) -> Integers:
    return Integers(shape=(tokens,), low=0, high=vocabulary)


CASES = (
    _case("1 token", Integers((3,)), 1, 64, 96),
    _case("odd sizes", _drawn(17, 101), 17, 33, 101),
    _case("ignored targets", Integers((-100, 4, -1, 0, 30)), 5, 32, 31),
    _case("all ignored", Integers((-100, -100, -1)), 3, 32, 31),
    _case("large vocabulary", _drawn(3, 50_257), 3, 24, 50_257),
    _case("many tokens", _drawn(515, 40), 515, 32, 40),
    _case("bias", _drawn(9, 65), 9, 32, 65, bias=True),
    _case("weighted tokens", Integers((7, 3, -100, 2, 0, 9)), 6, 32, 33, weighted=True),
    _case("divisor", _drawn(9, 65), 9, 32, 65, divisor=8.0),
    _case("soft cap", _drawn(9, 65), 9, 32, 65, soft_cap=3.0),
    _case(
        "bias, weights, divisor and soft cap",
        _drawn(9, 65),
        9,
        32,
        65,
        bias=True,
        weighted=True,
        divisor=2.0,
        soft_cap=5.0,
    ),
    _case("scaled gradients", _drawn(9, 65), 9, 32, 65, gradient_scale=512.0),
    _case(
        "backward starts here", _drawn(9, 65), 9, 32, 65, starts_backward=True, gradient_scale=64.0
    ),
    _case("sliced input", _drawn(9, 65), 9, 32, 65, layout="sliced"),
    _case("no tokens", Integers((), (0,)), 0, 32, 65),
)
