"""What the dimensions of a measured operator mean: its work, and in which terms it varies smoothly.

One entry per operator that `tutti profile` measures; the shapes of a profile are in this order of
dimensions. `flops` and `elements` are those of one pass and only scale the measurements: between
shapes the *rate* is interpolated, over the logarithms of `features`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tutti.cost.arrays import Number
from tutti.hardware.chip import Dtype

Direction = Literal["forward", "backward", "input_gradient", "weight_gradient", "inference"]
Part = Literal["gemm", "attention", "elementwise"]

PRODUCT: tuple[Direction, ...] = ("forward", "input_gradient", "weight_gradient")
BOTH: tuple[Direction, ...] = ("forward", "backward")
ONCE: tuple[Direction, ...] = ("forward",)
# Weights that never change, a step of a server that runs as one graph where the chip has graphs.
SERVED: tuple[Direction, ...] = ("inference",)

Dims = Sequence[Number]


def _nothing(dims: Dims) -> Number:
    return 0.0 * dims[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One operator's dimensions and what follows from them."""

    dims: tuple[str, ...]
    directions: tuple[Direction, ...] = BOTH
    part: Part = "elementwise"
    flops: Callable[[Dims], Number] = _nothing
    elements: Callable[[Dims], Number]  # read and written
    features: Callable[[Dims], tuple[Number, ...]] = tuple
    idle: tuple[Direction, ...] = ()  # passes that multiply nothing
    added: Callable[[Dims], Number] = _nothing  # moved after a weight gradient, onto its sum
    weighs: bool = False  # backward is only about the weight: nobody waits for it
    # read and written where only some of the weights are: experts that no row of a step meets
    served_elements: Callable[[Dims], Number] | None = None


def _product(d: Dims) -> Number:
    return d[0] * d[2] + d[1] * d[2] + d[0] * d[1]


def _rows(passes: float) -> Form:
    """An operator over rows that reads and writes each element `passes` times in all."""
    return Form(dims=("rows", "width"), elements=lambda d: passes * d[0] * d[1])


def _pairs(d: Dims) -> Number:
    """Query-key pairs of causal attention."""
    return d[0] * d[2] * 0.5 * d[1] * (d[1] + 1.0)


def _expected_experts(d: Dims) -> Number:
    """Experts that get any of a batch's rows, each chosen as likely as another."""
    return d[3] * (1.0 - (1.0 - 1.0 / np.maximum(d[3], 1.0 + 1e-9)) ** d[0])


_HEADS = ("heads", "kv_heads", "head_dim", "value_dim")


def _read(rows: Number, keys: Number, d: Dims) -> Number:
    """Elements of keys and values that are read, and of queries and results."""
    heads, kv_heads, head_dim, value_dim = d[-4:]
    return (head_dim + value_dim) * (keys * kv_heads + rows * heads)


_LINEAR = Form(
    dims=("tokens", "out", "in"),
    directions=PRODUCT,
    part="gemm",
    flops=lambda d: 2.0 * d[0] * d[1] * d[2],
    elements=_product,
)
_GROUPED = Form(
    dims=("rows", "out", "in", "experts"),
    directions=PRODUCT,
    part="gemm",
    flops=lambda d: 2.0 * d[0] * d[1] * d[2],
    elements=lambda d: d[0] * d[2] + d[3] * d[1] * d[2] + d[0] * d[1],
    # the gradient, written and read; the sum, which is twice as wide, read and written
    added=lambda d: 6.0 * d[3] * d[1] * d[2],
    features=lambda d: (d[0] / d[3], d[1], d[2], d[3]),
    served_elements=lambda d: d[0] * (d[1] + d[2]) + _expected_experts(d) * d[1] * d[2],
)
NARROW: Mapping[str, str] = {
    "linear": "narrow_linear",
    "grouped_linear": "narrow_grouped_linear",
}
"""Products that may be made in 8 bits, and what they are called then; they stand beside bf16."""

_ATTENTION = Form(
    dims=("sequences", "length", "heads", "kv_heads", "head_dim", "value_dim"),
    part="attention",
    flops=lambda d: 2.0 * _pairs(d) * (d[4] + d[5]),
    elements=lambda d: d[0] * d[1] * (d[2] + d[3]) * (d[4] + d[5]),
    features=lambda d: (d[0] * d[2], d[1], d[2] / d[3], d[4], d[5]),
)

FORMS: Mapping[str, Form] = {
    "linear": _LINEAR,
    "grouped_linear": _GROUPED,
    "narrow_linear": _LINEAR,
    "narrow_grouped_linear": _GROUPED,
    "attention": _ATTENTION,
    "scored_attention": _ATTENTION,  # whose scores are capped
    "sink_attention": _ATTENTION,  # where heads may look at nothing
    "biased_attention": _ATTENTION,  # whose scores fall with the distance, by slopes (ALiBi)
    "rms_norm": _rows(2.0),
    "layer_norm": _rows(2.0),
    "add_rms_norm": _rows(4.0),
    "add_layer_norm": _rows(4.0),
    "activation": _rows(2.0),
    "gated_activation": _rows(3.0),
    "rotary": Form(
        dims=("tokens", "heads", "dim"),
        elements=lambda d: 2.0 * d[0] * d[1] * d[2],
    ),
    "add": Form(dims=("elements",), directions=ONCE, elements=lambda d: 3.0 * d[0]),
    "copy": Form(dims=("bytes",), directions=ONCE, elements=lambda d: 1.0 * d[0]),
    "embedding": Form(
        dims=("tokens", "width", "vocabulary"),
        elements=lambda d: 2.0 * d[0] * d[1],
    ),
    "linear_cross_entropy": Form(
        dims=("tokens", "vocabulary", "in"),
        part="gemm",
        flops=lambda d: 6.0 * d[0] * d[1] * d[2],  # forward makes the gradients, too
        elements=_product,
        idle=("backward",),
        weighs=True,
    ),
    "route": Form(
        dims=("tokens", "experts", "chosen"),
        elements=lambda d: 2.0 * d[0] * d[1],
    ),
    "permute": Form(
        dims=("tokens", "width", "chosen"),
        elements=lambda d: d[0] * d[1] * (1.0 + d[2]),
    ),
    "unpermute": Form(
        dims=("tokens", "width", "chosen"),
        elements=lambda d: d[0] * d[1] * (1.0 + d[2]),
    ),
    "adamw": Form(dims=("parameters",), directions=ONCE, elements=lambda d: 7.0 * d[0]),
    # --- of servers alone: rows of one token that look at as many keys each
    "decode_attention": Form(
        dims=("rows", "keys", *_HEADS),
        directions=SERVED,
        part="attention",
        flops=lambda d: 2.0 * d[0] * d[1] * d[2] * (d[4] + d[5]),
        elements=lambda d: _read(d[0], d[0] * d[1], d),
        features=lambda d: (d[0], d[1], d[2] / d[3], d[3], d[4], d[5]),
    ),
    # one chunk of a prompt behind what is stored of it
    "chunk_attention": Form(
        dims=("tokens", "before", *_HEADS),
        directions=SERVED,
        part="attention",
        flops=lambda d: 2.0 * (d[0] * d[1] + 0.5 * d[0] * (d[0] + 1.0)) * d[2] * (d[4] + d[5]),
        elements=lambda d: _read(d[0], d[0] + d[1], d),
        features=lambda d: (d[0], d[0] + d[1], d[2] / d[3], d[3], d[4], d[5]),
    ),
    # queries, keys and values of tokens: normed or not, rotated, the latter two to their pages
    "store_heads": Form(
        dims=("tokens", "heads", "kv_heads", "head_dim"),
        directions=SERVED,
        elements=lambda d: 2.0 * d[0] * (d[1] + 2.0 * d[2]) * d[3],
    ),
    "store_normed_heads": Form(
        dims=("tokens", "heads", "kv_heads", "head_dim"),
        directions=SERVED,
        elements=lambda d: 2.0 * d[0] * (d[1] + 2.0 * d[2]) * d[3],
    ),
    "sample": Form(
        dims=("rows", "vocabulary"), directions=SERVED, elements=lambda d: 3.0 * d[0] * d[1]
    ),
    # products whose weights, and whose weights and rows, are of 8 bits
    "fp8_linear": replace(_LINEAR, directions=SERVED),
    "int8_linear": replace(_LINEAR, directions=SERVED),
}


def row_name(operator: str, direction: Direction) -> str:
    """Return what a profile calls an operator's pass: "linear.forward", "copy"."""
    alone = FORMS[operator].directions == ONCE and direction == "forward"
    return operator if alone else f"{operator}.{direction}"


def row_flops(name: str, dims: Dims) -> Number:
    """Return the FLOPs of a profile's row; 0 for what multiplies nothing, or is not known here."""
    operator, _, direction = name.partition(".")
    form = FORMS.get(operator)
    return 0.0 if form is None or direction in form.idle else form.flops(dims)


def row_added(name: str, dims: Dims) -> Number:
    """Return the elements that are moved after a row's product, onto a sum."""
    operator, _, direction = name.partition(".")
    form = FORMS.get(operator)
    return 0.0 if form is None or direction != "weight_gradient" else form.added(dims)


def row_elements(name: str, dims: Dims) -> Number:
    """Return the elements that a forward pass reads and writes; a copy's are bytes."""
    operator, _, direction = name.partition(".")
    form = FORMS.get(operator)
    if form is None:
        return 0.0
    if direction == "inference" and form.served_elements is not None:
        return form.served_elements(dims)
    return form.elements(dims)


def profiled_update_bytes(dtype: Dtype) -> float:
    """Return what a profiled `adamw` moves of a parameter: two moments in fp32, no master."""
    return 3.0 * dtype.num_bytes + 4.0 * Dtype.FP32.num_bytes
