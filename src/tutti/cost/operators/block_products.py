"""The matrix products of a transformer block, by the collective that stands beside them.

Tensor parallelism gathers before the products that slice columns (queries, keys and values; the
way into the feed-forward layer) and reduces behind those that slice rows (the ways out).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tutti.cost.arrays import Machine, Shape, Strategy
from tutti.cost.constants import Constants
from tutti.cost.operators.operator_times import (
    ELEMENT_BYTES,
    Passes,
    flag,
    linear_seconds,
    memory_bound_seconds,
)
from tutti.models.anatomy import Product, attention_products, feed_forward_products

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
        args = (strategy, machine, constants)
        ways = feed_forward_products("mlp", shape.hidden, shape.ffn, shape.gated, tp=strategy.tp)
        *ways_in, way_out = attention_products(shape, strategy.tp)
        return cls(_fused(ways_in, *args), *(_linear(p, *args) for p in (way_out, *ways)))

    @property
    def attention(self) -> Passes:
        """The products around attention."""
        return self.into_attention.plus(self.out_of_attention)

    @property
    def feed_forward(self) -> Passes:
        """The products of the dense layer."""
        return self.into_feed_forward.plus(self.out_of_feed_forward)


def _linear(product: Product, strategy: Strategy, machine: Machine, constants: Constants) -> Passes:
    depth = np.maximum(product.depth, _SMALLEST)
    return linear_seconds(strategy.tokens, product.columns, depth, strategy, machine, constants)


def _fused(
    products: Sequence[Product], strategy: Strategy, machine: Machine, constants: Constants
) -> Passes:
    """Return the ways into attention: what reads the block's input is one product."""
    args = (strategy, machine, constants)
    source = products[0].reads
    first = [product for product in products if product.reads == source]
    joint = first[0]
    if len(first) > 1:
        columns = sum(product.columns * product.present for product in first)
        joint = joint._replace(columns=columns)
    total = _linear(joint, *args)
    for product in products:
        if product.reads != source:
            total = total.plus(_linear(product, *args), flag(product.present))
    return total


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

    def grouped(product: Product) -> Passes:
        return linear_seconds(
            rows / local, product.columns, np.maximum(product.depth, _SMALLEST), strategy, machine,
            constants, batch=local, rate=constants.moe_gemm_ratio,
        )  # fmt: skip

    ways = feed_forward_products("moe.experts", hidden, shape.expert_ffn, shape.gated)
    routed = grouped(ways[0]).plus(grouped(ways[1]))
    shared = shared_halves[0].plus(shared_halves[1])
    moved = rows * ELEMENT_BYTES * (6.0 * hidden + 3.0 * shape.expert_ffn)
    permute = memory_bound_seconds(moved, machine, constants, kernels=8.0)
    both = routed.plus(shared, flag(shape.shared_ffn > 0))
    return Passes(both.forward + permute, both.backward_input + 1.5 * permute, both.backward_weight)


def shared_products(
    shape: Shape, strategy: Strategy, machine: Machine, constants: Constants
) -> tuple[Passes, Passes]:
    """Return the products into and out of the experts that all tokens use, if there are any."""
    ways = feed_forward_products(
        "moe.shared", shape.hidden, shape.shared_ffn, shape.gated, tp=strategy.tp
    )
    first, second = (_linear(product, strategy, machine, constants) for product in ways)
    return first, second
