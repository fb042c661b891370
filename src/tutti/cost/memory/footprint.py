"""Peak memory per chip of plain strategies, vectorised: states, activations in flight, transients.

The published activation formulas (Korthikanti et al. 2022) for unfused blocks with dropout, the
same count for fused ones. Memory of an uneven plan, over time and under its actual schedule, is
`memory`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tutti.cost.arrays import FloatArray, Number, Shape, Strategy
from tutti.cost.operators.exposed_communication import context_bytes
from tutti.cost.operators.sizes import BlockSizes, block_sizes
from tutti.models.anatomy import feed_forward_products
from tutti.plan.job import ScheduleKind
from tutti.plan.schedules import PLAIN, StagePlace, schedule_record

WORKSPACE_BYTES = 0.3e9  # workspaces of products, staging of collectives, caches
LOGIT_BYTES = 9.0  # 16-bit logits, fp32 exponentials, half of their gradient
EAGER_LOGIT_BYTES = 14.0  # torch: 16-bit logits, fp32 copy, log-softmax and gradient
STATE_BYTES = 12.0  # Adam: fp32 master copy and two moments
PARAMETER_BYTES = 2.0
SHARDED_BYTES = 8.0  # fp32 parameters and gradients of an FSDP shard
PROCESS_FACTOR = 1.2  # what a caching allocator reserves over what is allocated
PROCESS_BYTES = 2e9  # driver context and communicators, outside the allocator
_MOSTLY = 0.51  # of the products run again: the block is recomputed as a whole


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Footprint:
    """Bytes at the peak on the fullest chip; `parts` sum to `total_bytes`."""

    total_bytes: FloatArray
    parts: dict[str, FloatArray]

    def of_process(self) -> FloatArray:
        """Return what the vendor's tool shows for the process."""
        return PROCESS_FACTOR * self.total_bytes + PROCESS_BYTES


def activation_bytes(shape: Shape, strategy: Strategy, *, expert: bool = False) -> FloatArray:
    """Return what one block keeps of one micro-batch on one rank.

    Unfused with dropout: T·h·(10 + 24/t + 5·a·s/(h·t)), all over t with sequence parallelism, no
    scores where attention runs again, 2·T·h where all of it does. Fused: norms 8·h, queries, keys,
    values and context, the feed-forward layer's inputs.
    """
    tokens, h, t = strategy.tokens, shape.hidden, strategy.tp
    outside = np.where(strategy.sequence_parallel > 0, 1.0 / t, 1.0)
    scores = 5.0 * shape.heads * strategy.sequence_length / (h * t)
    scores = np.where(strategy.recompute_attention > 0, 0.0, scores)
    unfused = tokens * h * (10.0 * outside + 24.0 / t + scores)
    fused = tokens * (8.0 * h * outside + _fused_widths(shape, expert=expert) / t)
    kept = np.where((strategy.flash > 0) | (shape.dropout == 0), fused, unfused)
    boundary = 2.0 * tokens * h * outside
    again = strategy.recompute_gemm
    # Per operator: the results of every other product, and of what is cheap to keep.
    partly = boundary + (1.0 - 0.5 * again) * 0.6 * fused
    result: FloatArray = np.where(again > _MOSTLY, boundary, np.where(again > 0, partly, kept))
    return result


def _fused_widths(shape: Shape, *, expert: bool) -> FloatArray:
    """Return the bytes per token that tensor parallelism slices."""
    latent = 2.0 * (shape.q_lora + shape.kv_lora + shape.rope_dim)
    kv_heads = np.where(shape.kv_lora > 0, shape.heads, shape.kv_heads)
    attention = 2.0 * (shape.heads * shape.d_qk + kv_heads * (shape.d_qk + shape.d_v))
    attention = attention + 2.0 * shape.heads * shape.d_v + latent
    if not expert:
        return attention + _kept_width(shape, shape.ffn)
    routed = shape.topk * (2.0 * shape.hidden + _kept_width(shape, shape.expert_ffn))
    return attention + _kept_width(shape, shape.shared_ffn) + routed


def _kept_width(shape: Shape, width: FloatArray) -> FloatArray:
    """Return the bytes per token that a feed-forward layer keeps: before and behind activation."""
    way_in, way_out = feed_forward_products("mlp", shape.hidden, width, shape.gated)
    kept: FloatArray = 2.0 * (way_in.columns + way_out.depth)
    return kept


def footprint(
    shape: Shape,
    strategy: Strategy,
    *,
    state_bytes: Number = STATE_BYTES,
    logit_bytes: Number = LOGIT_BYTES,
) -> Footprint:
    """Return the peak over the first and the last stage, with the parts of the fuller one."""
    dense = activation_bytes(shape, strategy)
    routed = activation_bytes(shape, strategy, expert=True) if np.any(shape.experts > 0) else dense
    per_stage = np.ceil(shape.layers / strategy.pp)
    ends = (np.minimum(shape.layers - shape.moe_layers, per_stage), strategy.pp == 1)
    last = (per_stage - np.minimum(shape.moe_layers, per_stage), np.asarray(True))
    both = []
    for (num_dense, has_head), flight in ((ends, _in_flight(strategy)), (last, np.ones(()))):
        kept = flight * (num_dense * dense + (per_stage - num_dense) * routed)
        transient = _transient(shape, strategy, num_dense, has_head, logit_bytes)
        states = _states(shape, strategy, num_dense, per_stage, state_bytes)
        both.append({"states": states, "activations": kept, "transient": transient})
    first_total, last_total = (sum(parts.values(), np.zeros(())) for parts in both)
    fuller = last_total > first_total
    parts = {name: np.where(fuller, both[1][name], both[0][name]) for name in both[0]}
    parts["workspace"] = np.asarray(WORKSPACE_BYTES)
    return Footprint(total_bytes=sum(parts.values(), np.zeros(())), parts=parts)


def _in_flight(strategy: Strategy) -> FloatArray:
    """Return the micro-batches that the first stage holds under 1F1B, interleaved or not.

    As published: what it holds of a step without end, less where a step has no round of stages.
    """
    depth = strategy.pp
    endless = StagePlace(depth, 0.0, depth, strategy.vpp)
    several = schedule_record(ScheduleKind.INTERLEAVED).ahead(endless) / strategy.vpp
    held = np.where(strategy.vpp > 1, several, schedule_record(PLAIN).ahead(endless))
    flight: FloatArray = held * np.minimum(strategy.micro_batches, depth) / depth
    return flight


def _states(
    shape: Shape,
    strategy: Strategy,
    num_dense: FloatArray,
    per_stage: FloatArray,
    state_bytes: Number,
) -> FloatArray:
    sizes: BlockSizes = block_sizes(shape)
    group, ep = strategy.dp * strategy.cp, np.maximum(strategy.ep, 1.0)
    num_routed = per_stage - num_dense
    table = shape.vocab * shape.hidden / strategy.tp
    tables = np.where((strategy.pp > 1) | (shape.tied > 0), 1.0, 2.0)
    blocks = per_stage * sizes.attention + num_dense * sizes.dense + num_routed * sizes.shared
    dense = blocks / strategy.tp + tables * table
    experts = num_routed * sizes.expert * shape.experts / ep
    whole = dense + experts
    # FSDP alone holds two gathered blocks and a table; with a pipeline the stage stays gathered.
    two_blocks = 2.0 * PARAMETER_BYTES * (sizes.attention + sizes.dense) / strategy.tp
    stage = (PARAMETER_BYTES + strategy.grad_bytes) * whole
    gathered = np.where(strategy.pp > 1, stage, two_blocks + PARAMETER_BYTES * table)
    sharded = (SHARDED_BYTES + state_bytes) * whole / group + gathered
    expert_group = np.maximum(group / ep, 1.0)
    shares = np.where(strategy.shard == 1, dense / group + experts / expert_group, whole)
    plain = (PARAMETER_BYTES + strategy.grad_bytes) * whole + state_bytes * shares
    result: FloatArray = np.where(strategy.shard >= 3, sharded, plain)
    return result


def _transient(
    shape: Shape,
    strategy: Strategy,
    num_dense: FloatArray,
    has_head: FloatArray | np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
    logit_bytes: Number,
) -> FloatArray:
    """Return the larger of the loss (logits) and a block's backward (a weight gradient)."""
    tokens, t = strategy.tokens, strategy.tp
    loss = np.where(has_head, tokens * shape.vocab / t * logit_bytes, 0.0)
    loss = np.where(shape.head_vocab > 1, loss, 0.0)  # a reward model has no logits
    way_in, _ = feed_forward_products("mlp", shape.hidden, shape.ffn, shape.gated, tp=t)
    first = way_in.columns * way_in.depth
    backward = (2.0 + strategy.grad_bytes) * first + 6.0 * tokens * shape.ffn / t
    backward = np.where(num_dense > 0, backward, 0.0)
    block = 8.0 * shape.hidden + 4.0 * (shape.heads + shape.kv_heads) * shape.d_v
    block = block + _kept_width(shape, shape.ffn)
    again = np.where(strategy.recompute_gemm > _MOSTLY, tokens * block / t, 0.0)
    result: FloatArray = np.maximum(loss, backward + again + _context_buffers(shape, strategy))
    return result


def _context_buffers(shape: Shape, strategy: Strategy) -> FloatArray | float:
    """Return others' keys and values and their gradients: all of them, or a ring's next piece."""
    if np.all(strategy.cp == 1):
        return 0.0
    pieces = np.where(strategy.context_gather > 0, strategy.cp, 1.0)
    buffers = 2.0 * pieces * context_bytes(shape, strategy)
    result: FloatArray = np.where(strategy.cp > 1, buffers, 0.0)
    return result
