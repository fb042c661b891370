"""Calls of AdamW and of the gradient norm."""

from __future__ import annotations

import math
from typing import Any

from tutti.accelerator.conformance.case import Case, Layout, Values
from tutti.accelerator.reference.optimizer import AdamSettings

SIZES = ((7,), (33, 17), (1,), (4, 5, 6))
SETTINGS = AdamSettings(learning_rate=0.1, weight_decay=0.1)


def _adamw(
    name: str,
    *,
    wide_weights: bool = False,
    wide_states: bool = True,
    sizes: tuple[tuple[int, ...], ...] = SIZES,
    step: int = 3,
    settings: AdamSettings = SETTINGS,
    factor: float | None = None,  # the scale of a random one
    copies: bool = False,
    layout: Layout = "contiguous",  # of what a module holds: weights or their copies, gradients
) -> Case:
    def many(**options: Any) -> tuple[Values, ...]:
        return tuple(Values(size, trained=False, **options) for size in sizes)

    options: dict[str, Any] = {"step": step, "settings": settings}
    if factor is not None:
        values = Values((), factor, trained=False, wide=True, positive=True)
        options["gradient_factor"] = values
    if copies:
        options["copies"] = many(layout=layout)
    states = {"wide": wide_states}
    return Case(
        "adamw",
        name,
        (
            many(wide=wide_weights, layout="contiguous" if copies else layout),
            many(layout=layout),
            many(**states),
            many(positive=True, **states),
        ),
        options,
        in_place=True,
    )


CASES = (
    _adamw("float32 states"),
    _adamw("states of the dtype", wide_states=False),
    _adamw("float32 weights with copies", wide_weights=True, copies=True),
    _adamw("clipped", wide_weights=True, factor=1.0, copies=True),
    _adamw("skipped: the factor is not a number", wide_weights=True, factor=math.nan, copies=True),
    _adamw("skipped, states of the dtype", wide_states=False, factor=math.nan),
    _adamw("first step", step=1),
    _adamw("late step, no decay", step=100_000, settings=AdamSettings(learning_rate=0.02)),
    _adamw("one large tensor", sizes=((70_001,),), wide_weights=True),
    _adamw("even tensors", sizes=((64, 48), (32,), (9000, 16)), wide_states=False, factor=1.0),
    _adamw("parts of stored tensors", sizes=((4, 5, 6), (3, 7)), layout="heads"),
    _adamw(
        "masters of parts",
        sizes=((4, 5, 6),),
        layout="heads",
        wide_weights=True,
        factor=1.0,
        copies=True,
    ),
    _adamw("no runs of memory", sizes=((4, 5, 6),), layout="transposed"),
    _adamw("an empty tensor", sizes=((0,), (5,))),
    Case("squared_norm", "several", (tuple(Values(s, trained=False) for s in SIZES),), terms=561),
    Case(
        "squared_norm",
        "even",
        (tuple(Values(s, trained=False) for s in ((64, 48), (20_000,))),),
        terms=23_072,
    ),
    Case("squared_norm", "large", ((Values((70_001,), trained=False),),), terms=70_001),
    Case(
        "squared_norm",
        "large part of a stored tensor",
        ((Values((11, 1000, 100), trained=False, layout="heads"),),),
        terms=1_100_000,
    ),
    Case(
        "squared_norm",
        "sliced and empty",
        ((Values((9, 32), trained=False, layout="sliced"), Values((0,), trained=False)),),
        terms=288,
    ),
)
