"""Parameters and model FLOPs of shapes, as arrays: what `step` and `footprint` count with.

Exact for products with weights; biases, norms and learned positions are left out. A test holds the
counts against `models`, which has them tensor by tensor.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tutti.cost.arrays import FloatArray, Shape, Strategy
from tutti.models.anatomy import (
    Product,
    attention_products,
    feed_forward_products,
    router_product,
)


class BlockSizes(NamedTuple):
    """Parameters of one block, not sliced."""

    attention: FloatArray
    dense: FloatArray  # feed-forward layer
    shared: FloatArray  # shared experts and router
    expert: FloatArray  # one routed expert


def block_sizes(shape: Shape) -> BlockSizes:
    """Return the parameters of a block by part."""
    hidden, gated = shape.hidden, shape.gated

    def size(*products: Product) -> FloatArray:
        counts = (p.columns * p.depth * p.present for p in products)
        return sum(counts, np.zeros(()))

    def layer(width: FloatArray) -> tuple[Product, Product]:
        return feed_forward_products("mlp", hidden, width, gated)

    return BlockSizes(
        attention=size(*attention_products(shape)),
        dense=size(*layer(shape.ffn)),
        shared=size(*layer(shape.shared_ffn), router_product(hidden, shape.experts)),
        expert=size(*layer(shape.expert_ffn)),
    )


class RankParameters(NamedTuple):
    """Parameters that a rank of an average stage computes with."""

    dense: FloatArray  # replicated over data parallelism, the tables included
    experts: FloatArray
    table: FloatArray  # one embedding or head


def rank_parameters(shape: Shape, strategy: Strategy) -> RankParameters:
    """Return a rank's slices; a stage of a pipeline holds one table, a tied model too."""
    sizes = block_sizes(shape)
    routed = shape.moe_layers / shape.layers
    per_stage = shape.layers / strategy.pp
    block = sizes.attention + (1.0 - routed) * sizes.dense + routed * sizes.shared
    table = shape.vocab * shape.hidden / strategy.tp
    tables = np.where((strategy.pp > 1) | (shape.tied > 0), 1.0, 2.0)
    local = sizes.expert * shape.experts / np.maximum(strategy.ep, 1.0)
    return RankParameters(
        dense=per_stage * block / strategy.tp + table * tables,
        experts=per_stage * routed * local,
        table=table,
    )


def matmul_parameters(shape: Shape) -> FloatArray:
    """Return N: what a token is multiplied with, the head included, of experts its own."""
    sizes = block_sizes(shape)
    dense_layers = shape.layers - shape.moe_layers
    routed = sizes.shared + shape.topk * sizes.expert
    blocks = shape.layers * sizes.attention + dense_layers * sizes.dense
    return blocks + shape.moe_layers * routed + shape.vocab * shape.hidden


def flops_per_token(shape: Shape, sequence_length: FloatArray) -> FloatArray:
    """Return the model FLOPs of training on one token: 6·N + 6·Σ heads·(d_qk + d_v)·context."""
    context = np.minimum(sequence_length, shape.window)
    attention = shape.layers * shape.heads * (shape.d_qk + shape.d_v) * context
    return 6.0 * matmul_parameters(shape) + 6.0 * attention


def tokens_per_step(strategy: Strategy) -> FloatArray:
    """Return the tokens of the global batch."""
    sequences = strategy.sequences * strategy.micro_batches * strategy.dp
    return sequences * strategy.sequence_length


def recomputed_flops_per_token(shape: Shape, strategy: Strategy) -> FloatArray:
    """Return what recomputation adds: a third of the training FLOPs of what runs again."""
    head = shape.vocab * shape.hidden
    blocks = 2.0 * (matmul_parameters(shape) - head)
    context = np.minimum(strategy.sequence_length, shape.window)
    attention = 2.0 * shape.layers * shape.heads * (shape.d_qk + shape.d_v) * context
    return strategy.recompute_gemm * blocks + strategy.recompute_attention * attention
