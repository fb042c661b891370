"""The matrix products of a transformer block, by the collective that stands beside them.

Tensor parallelism gathers before the products that slice columns (queries, keys and values; the
way into the feed-forward layer) and reduces behind those that slice rows (the ways out).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tutti.cost.arrays import Machine, Number, Shape, Strategy
from tutti.cost.constants import Constants
from tutti.cost.operators.operator_times import (
    ELEMENT_BYTES,
    Passes,
    flag,
    linear_seconds,
    memory_bound_seconds,
)

_SMALLEST = 8.0  # stands in for a width of zero, whose result is not used


class Products(NamedTuple):
    """The four groups of products of a block with a dense feed-forward layer."""

    into_attention: Passes
    out_of_attention: Passes
    into_feed_forward: Passes
    out_of_feed_forward: Passes

    @classmethod
    def of(
        cls, shape: Shape, strategy: Strategy, machine: Machine, constants: Constants
    ) -> Products:
        """Return the products of one rank for one micro-batch."""
        tokens, tp = strategy.tokens, strategy.tp

        def linear(n: Number, k: Number) -> Passes:
            return linear_seconds(tokens, n, k, strategy, machine, constants)

        return cls(
            _attention_projections(shape, strategy, machine, constants),
            linear(shape.hidden, shape.heads * shape.d_v / tp),
            linear(shape.ffn * (1.0 + shape.gated) / tp, shape.hidden),
            linear(shape.hidden, shape.ffn / tp),
        )

    @property
    def attention(self) -> Passes:
        """The products around attention."""
        return self.into_attention.plus(self.out_of_attention)

    @property
    def feed_forward(self) -> Passes:
        """The products of the dense layer."""
        return self.into_feed_forward.plus(self.out_of_feed_forward)


def _attention_projections(
    shape: Shape, strategy: Strategy, machine: Machine, constants: Constants
) -> Passes:
    """Return the products before attention: fused q, k, v, or latent attention's down and up."""
    tokens, tp = strategy.tokens, strategy.tp
    heads = shape.heads / tp
    kv_heads = shape.kv_heads / np.minimum(tp, shape.kv_heads)
    plain = heads * shape.d_qk + kv_heads * (shape.d_qk + shape.d_v)

    def linear(n: Number, k: Number) -> Passes:
        return linear_seconds(tokens, n, k, strategy, machine, constants)

    latent = shape.kv_lora > 0
    if not np.any(latent):
        return linear(plain, shape.hidden)
    down = shape.q_lora + shape.kv_lora + shape.rope_dim
    down = down + np.where(shape.q_lora > 0, 0.0, heads * shape.d_qk)  # no latent for queries
    first = linear(np.where(latent, down, plain), shape.hidden)
    queries = linear(heads * shape.d_qk, np.maximum(shape.q_lora, _SMALLEST))
    nope = shape.d_qk - shape.rope_dim
    keys = linear(heads * (nope + shape.d_v), np.maximum(shape.kv_lora, _SMALLEST))
    return first.plus(queries, flag(latent & (shape.q_lora > 0))).plus(keys, flag(latent))


def expert_products(
    shape: Shape,
    strategy: Strategy,
    machine: Machine,
    constants: Constants,
    shared_halves: tuple[Passes, Passes],
) -> Passes:
    """Return routed experts in balance, shared experts, and the moves of tokens between them."""
    tokens, tp, hidden = strategy.tokens, strategy.tp, shape.hidden
    local = np.maximum(shape.experts / strategy.ep, 1.0)
    rows = tokens / tp * shape.topk  # every tensor-parallel rank routes its own tokens
    ratio = constants.moe_gemm_ratio
    width = np.maximum(shape.expert_ffn, _SMALLEST)
    args = (strategy, machine, constants)
    columns = shape.expert_ffn * (1.0 + shape.gated)
    routed = linear_seconds(rows / local, columns, hidden, *args, batch=local, rate=ratio)
    routed = routed.plus(
        linear_seconds(rows / local, hidden, width, *args, batch=local, rate=ratio)
    )
    shared = shared_halves[0].plus(shared_halves[1])
    moved = rows * ELEMENT_BYTES * (6.0 * hidden + 3.0 * shape.expert_ffn)
    permute = memory_bound_seconds(moved, machine, constants, kernels=8.0)
    both = routed.plus(shared, flag(shape.shared_ffn > 0))
    return Passes(both.forward + permute, both.backward_input + 1.5 * permute, both.backward_weight)


def shared_products(
    shape: Shape, strategy: Strategy, machine: Machine, constants: Constants
) -> tuple[Passes, Passes]:
    """Return the products into and out of the experts that all tokens use, if there are any."""
    tokens, tp, width = strategy.tokens, strategy.tp, np.maximum(shape.shared_ffn, _SMALLEST)
    args = (strategy, machine, constants)
    return (
        linear_seconds(tokens, width * (1.0 + shape.gated) / tp, shape.hidden, *args),
        linear_seconds(tokens, shape.hidden, width / tp, *args),
    )
