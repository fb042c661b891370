"""What of a block's own collectives is exposed: tensor (whole or in chunks), context, expert.

In c chunks a collective runs piece by piece beside the pieces of its product. Nothing hides the
first piece (of a gather) or the last (of a reduction), and of the others only what the piece of
product beside them does not last:

    exposed = q + (c − 1) · max(0, q − g),   q = α + bytes/c ÷ β,   g = the product of T/c rows

With sequence parallelism a rank keeps its own tokens of a column product's input and gathers all
once more in backward, for the weight's gradient, ahead of the pieces that are reduced:

    exposed = q + max(0, (c − 1) · (q − g), Q + (c − 1) · q − c · g),   Q = α + bytes ÷ β

Every piece pays the latency α, and c products of T/c rows take longer than one of T (fewer tiles,
one kernel gap each): chunks pay on large shapes and cost on small ones.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tutti.cost.arrays import FloatArray, Machine, Number, Shape, Strategy
from tutti.cost.constants import Constants
from tutti.cost.network.closed_forms import (
    Span,
    all_reduce_seconds,
    all_to_all_seconds,
    ring_pass_seconds,
)
from tutti.cost.operators.block_products import Products
from tutti.cost.operators.operator_times import ELEMENT_BYTES, Passes
from tutti.models.anatomy import rank_kv_heads

# Half of the attention hides the ring: the mask leaves steps unequal, and the kernels start late.
_RING_HIDDEN = 0.5


class PerCollective(NamedTuple):
    """A figure of each kind of collective inside a block."""

    tensor: float
    context: float
    experts: float


AS_PRICED = PerCollective(1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spans:
    """How the groups inside a replica lie, where they are not aligned with the nodes.

    Their collectives take `longer` than on links of their own, where others send beside them.
    """

    tp: Span | None = None
    cp: Span | None = None
    longer: PerCollective = AS_PRICED


ALIGNED_SPANS = Spans()


class Exposed(NamedTuple):
    """Exposed seconds of the collectives of one pass."""

    forward: FloatArray
    backward: FloatArray


def tensor_bytes(shape: Shape, strategy: Strategy) -> FloatArray:
    """Return what a rank of a tensor group puts into a collective, and gets out of it."""
    size: FloatArray = strategy.tokens * shape.hidden * ELEMENT_BYTES
    return size


def tensor_once(
    num_bytes: FloatArray,
    strategy: Strategy,
    machine: Machine,
    constants: Constants,
    spans: Spans,
) -> FloatArray:
    """Return an all-reduce, or the gather and the scatter that sequence parallelism has for it."""
    once = all_reduce_seconds(num_bytes, strategy.tp, 1.0, machine, constants, spans.tp)
    pairs = (strategy.sequence_parallel > 0) & (strategy.tp > 1)
    seconds: FloatArray = (once + np.where(pairs, constants.link_latency_s, 0.0)) * (
        spans.longer.tensor
    )
    return seconds


def tensor_parallel(
    shape: Shape,
    strategy: Strategy,
    machine: Machine,
    constants: Constants,
    spans: Spans = ALIGNED_SPANS,
) -> Exposed:
    """Return the collectives of a block that are not cut: two all-reduces, or two pairs."""
    once = tensor_once(tensor_bytes(shape, strategy), strategy, machine, constants, spans)
    hidden_share = np.where(strategy.async_tp > 0, constants.async_tp_hidden, 0.0)
    exposed: FloatArray = 2.0 * once * (1.0 - hidden_share)
    return Exposed(exposed, exposed)


def in_chunks(
    shape: Shape,
    strategy: Strategy,
    machine: Machine,
    constants: Constants,
    spans: Spans,
    whole: Passes,
    uncut: Exposed,
    routed: FloatArray,
) -> tuple[Passes, Exposed]:
    """Return products and exposed collectives where strategies cut them; the others as given.

    Routed experts have an exchange between their collective and their products: it stays whole.
    """
    count = strategy.overlap_chunks
    pieces = dataclasses.replace(strategy, sequences=strategy.sequences / count)
    piece = Products.of(shape, pieces, machine, constants)
    full = Products.of(shape, strategy, machine, constants)
    paired = strategy.sequence_parallel > 0  # a gather before and a scatter behind each half
    unit_bytes = tensor_bytes(shape, strategy)
    step = tensor_once(unit_bytes / count, strategy, machine, constants, spans)
    step = np.where(paired, 0.5, 1.0) * step
    once = tensor_once(unit_bytes, strategy, machine, constants, spans)
    again = 0.5 * once  # a column product's input, for the weight's gradient
    gemm, exposed = list(whole), [routed * once, routed * once]
    for index, (one, other) in enumerate(zip(piece, full, strict=True)):
        weight = 1.0 if index < 2 else 1.0 - routed
        for direction in (0, 1):  # forward and input gradient; the latter runs the way back
            reduces = (index % 2 == 1) == (direction == 0)
            split = np.where(paired | reduces, weight, 0.0)
            gemm[direction] = gemm[direction] + split * (count * one[direction] - other[direction])
            late = (count - 1.0) * np.maximum(0.0, step - one[direction])
            if direction == 1 and reduces:
                both = again + (count - 1.0) * step - count * one[direction]
                late = np.maximum(late, np.where(paired, both, 0.0))
            exposed[direction] = exposed[direction] + split * (step + late)
    cut = (count > 1) & (strategy.tp > 1)
    return (
        Passes(*(np.where(cut, a, b) for a, b in zip(gemm, whole, strict=True))),
        Exposed(*(np.where(cut, a, b) for a, b in zip(exposed, uncut, strict=True))),
    )


def expert_parallel(
    once: FloatArray, shape: Shape, strategy: Strategy, shared_halves: tuple[Passes, Passes]
) -> Exposed:
    """Return what is exposed of the way to the experts and of the way back, `once` each.

    The first half of the shared experts is computed beside the one, the second beside the other;
    their gradients beside those of the ways, in turn.
    """
    beside = (strategy.shared_beside > 0) & (shape.shared_ffn > 0)
    halves = []
    for direction in (0, 1):
        late = sum(np.maximum(0.0, once - half[direction]) for half in shared_halves)
        halves.append(np.where(beside, late, 2.0 * once))
    return Exposed(*halves)


def context_bytes(shape: Shape, strategy: Strategy) -> FloatArray:
    """Return the keys and values that one rank holds of its own tokens."""
    heads = rank_kv_heads(shape.kv_heads, strategy.tp)
    held: FloatArray = strategy.tokens * heads * (shape.d_qk + shape.d_v) * ELEMENT_BYTES
    return held


def context_once(
    shape: Shape, strategy: Strategy, machine: Machine, constants: Constants, spans: Spans
) -> FloatArray:
    """Return one exchange of keys and values: cp − 1 messages around a ring, or one gather."""
    cp = strategy.cp
    whole = context_bytes(shape, strategy) * cp
    once = ring_pass_seconds(whole, cp, strategy.tp, machine, constants, spans.cp)
    ring = once + np.maximum(cp - 2.0, 0.0) * constants.link_latency_s
    seconds: FloatArray = np.where(strategy.context_gather > 0, once, ring) * spans.longer.context
    return seconds


def context_parallel(
    shape: Shape,
    strategy: Strategy,
    machine: Machine,
    constants: Constants,
    spans: Spans,
    attention: FloatArray,
) -> FloatArray:
    """Return what of the exchange of keys and values one pass of attention does not hide.

    A ring passes them on in cp − 1 messages, each beside the attention of the piece that arrived
    before; all steps are alike, so that what they expose together is the difference of the sums.
    A gather is one collective, with one latency, and nothing runs beside it.
    """
    if np.all(strategy.cp == 1):
        return np.zeros_like(attention)
    once = context_once(shape, strategy, machine, constants, spans)
    beside = np.maximum(0.0, once - _RING_HIDDEN * attention)
    exposed: FloatArray = np.where(strategy.context_gather > 0, once, beside)
    return exposed


def expert_bytes(shape: Shape, strategy: Strategy) -> FloatArray:
    """Return the rows that a rank sends to experts, its own part of the tokens."""
    size: FloatArray = strategy.tokens / strategy.tp * shape.topk * shape.hidden * ELEMENT_BYTES
    return size


def expert_once(
    shape: Shape,
    strategy: Strategy,
    machine: Machine,
    constants: Constants,
    spans: Spans,
    stride: Number,
) -> FloatArray:
    """Return one way to the experts, or back; chips of an expert group lie `stride` apart."""
    copies = np.where(strategy.once_per_node > 0, np.maximum(shape.topk, 1.0), 1.0)
    sent = expert_bytes(shape, strategy)
    once = all_to_all_seconds(sent, strategy.ep, stride, machine, constants, copies=copies)
    return once * spans.longer.experts
