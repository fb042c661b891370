"""Calls of the router, and of the way to the experts and back."""

from __future__ import annotations

from tutti.accelerator.conformance.case import Case, Integers, Layout, Values
from tutti.models.parts import RouterSpec


def _route(
    name: str,
    router: RouterSpec,
    tokens: int,
    experts: int,
    top: int,
    *,
    correction: bool = False,
) -> Case:
    steer = Values((experts,), 0.1, trained=False, wide=True) if correction else None
    logits = Values((tokens, experts), distinct=True)
    return Case("route", name, (logits, router, top, steer), terms=experts)


def _permute(
    name: str,
    chosen: Integers,
    tokens: int,
    num_experts: int,
    top: int,
    *,
    width: int = 32,
    layout: Layout = "contiguous",
) -> Case:
    x = Values((tokens, width), layout=layout)
    return Case("permute", name, (x, chosen, num_experts), terms=top)


def _unpermute(name: str, tokens: int, top: int, width: int = 32, wide: bool = False) -> Case:
    order = tuple(reversed(range(tokens * top)))
    return Case(
        "unpermute",
        name,
        (
            Values((tokens * top, width)),
            Integers(order, (tokens * top,)),
            Values((tokens, top), wide=wide),
        ),
        terms=max(top, width),
    )


_GROUPS = RouterSpec(scores="sigmoid", groups=4, top_groups=2, group_score="top2", normalize=True)

CASES = (
    _route("softmax, 1 token", RouterSpec(), 1, 8, 2),
    _route("softmax, normalized", RouterSpec(normalize=True), 33, 60, 4),
    _route("softmax over the chosen", RouterSpec(scores="topk_softmax"), 17, 32, 4),
    _route("softmax of those near", RouterSpec(scores="near_softmax", near=0.4), 17, 16, 2),
    _route("sigmoid, scaled", RouterSpec(scores="sigmoid", scale=2.5), 17, 16, 3),
    _route(
        "sigmoid, corrected",
        RouterSpec(scores="sigmoid", correction="buffer", normalize=True),
        17, 16, 4, correction=True,
    ),
    _route("groups by two best, corrected", _GROUPS, 9, 32, 6, correction=True),
    _route("groups by the best", RouterSpec(groups=4, top_groups=1), 9, 32, 3),
    _route("least sum", RouterSpec(normalize=True, normalize_min=0.5), 9, 12, 2),
    _route("256 experts", RouterSpec(scores="sigmoid", normalize=True), 5, 256, 8),
    _route("all experts", RouterSpec(normalize=True), 5, 4, 4),
    _route("no tokens", RouterSpec(normalize=True), 0, 8, 2),
    _permute("1 token", Integers((3, 0), (1, 2)), 1, 4, 2),
    _permute("empty experts", Integers((5, 1, 1, 5, 5, 0), (3, 2)), 3, 8, 2),
    _permute("one expert each", Integers(shape=(19, 1), low=0, high=7), 19, 7, 1, width=33),
    _permute("all to one expert", Integers((2,) * 40, (40, 1)), 40, 4, 1),
    _permute(
        "sliced rows", Integers((0, 1, 2, 0, 1, 2), (3, 2)), 3, 3, 2, layout="sliced"
    ),
    _permute("no tokens", Integers((), (0, 2)), 0, 4, 2),
    _unpermute("1 token", 1, 2),
    _unpermute("odd width", 17, 3, 33),
    _unpermute("one expert each", 9, 1),
    _unpermute("float32 weights", 9, 4, wide=True),
    _unpermute("no tokens", 0, 2),
)  # fmt: skip
