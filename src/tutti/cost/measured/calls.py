"""The operators that the engine runs for a unit, with their shapes: what is measured and priced.

One enumeration serves both: `tutti profile MODEL` measures these calls, and prices are sums over
them. Sizes broadcast over strategies. Collectives are not among them. It follows `tutti.nn`: one
product each for queries, keys and values and for gate and up; residual sums fused into norms where
a norm follows inside the block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tutti.cost.arrays import Number, Strategy
from tutti.cost.measured.forms import NARROW
from tutti.models.anatomy import (
    BlockWidths,
    Product,
    Sliced,
    attention_products,
    block_norm_names,
    feed_forward_products,
    rank_kv_heads,
    rotated_heads,
    router_product,
)
from tutti.models.flops import DIVERGENCE_PASSES
from tutti.models.parts import AttentionSpec, BlockSpec, MoeSpec, NormSpec, Placement, Residual
from tutti.models.spec import ModelSpec

JOIN = 0.7  # passes of a sum of two tensors that joining the gradients of q, k and v takes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One operator on one shape, `times` per pass of the unit."""

    operator: str
    dims: tuple[Number, ...]
    times: Number = 1.0
    backward_times: Number | None = None  # None: as often as forward
    may_narrow: bool = False  # a product of 8 bits where the job has such


def operators_of(call: Call) -> tuple[str, ...]:
    """Return what a call may run, in one precision or another."""
    return (call.operator, NARROW[call.operator]) if call.may_narrow else (call.operator,)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sizes:
    """What a rank computes, as the operators count it."""

    tokens: Number  # through sliced products
    rows: Number  # through norms and residuals
    strategy: Strategy

    @classmethod
    def of(cls, strategy: Strategy) -> _Sizes:
        tokens = strategy.tokens
        rows = np.where(strategy.sequence_parallel > 0, tokens / strategy.tp, tokens)
        return cls(tokens=tokens, rows=rows, strategy=strategy)


def block_calls(
    spec: ModelSpec, block: BlockSpec, strategy: Strategy, *, serves: bool = False
) -> list[Call]:
    """Return the operators of one block; with `serves` as a server runs them.

    A server's attention to pages is not among them: it hangs on more than the tokens of a step.
    """
    sizes, hidden = _Sizes.of(strategy), spec.hidden
    calls = [
        *_norms(block, sizes.rows, hidden, serves=serves),
        *_attention(block, sizes, hidden, serves=serves),
    ]
    if block.mlp is not None:
        calls += _feed_forward("mlp", sizes, hidden, block.mlp.hidden, gated=block.mlp.gated)
    if block.moe is not None:
        calls += _moe(block.moe, sizes, hidden)
    return calls


def _norms(block: BlockSpec, rows: Number, hidden: int, *, serves: bool) -> list[Call]:
    """The norms and residual sums around attention and feed-forward layer."""
    norm = f"{block.norm.kind}_norm"
    elements = rows * hidden
    plain = Call(operator=norm, dims=(rows, hidden))
    fused = Call(operator=f"add_{norm}", dims=(rows, hidden))
    # The residual stream has two users, whose gradients are summed.
    joined = Call(operator="add", dims=(elements,), backward_times=1.0)
    if block.placement is Placement.PRE and block.residual is Residual.SEQUENTIAL:
        # a server leaves the last sum of a block to the first norm of the next
        return [fused, fused] if serves else [plain, fused, joined]
    return [plain] * len(block_norm_names(block)) + [joined] * 2


def _norm_call(norm: NormSpec, rows: Number, width: Number) -> Call:
    return Call(operator=f"{norm.kind}_norm", dims=(rows, width))


def _linear(product: Product, rows: Number, *, may_narrow: bool = True) -> Call:
    dims = (rows, product.columns, product.depth)
    return Call(operator="linear", dims=dims, may_narrow=may_narrow)


def _grouped(rows: Number, out: Number, deep: Number, experts: Number) -> Call:
    dims = (rows, out, deep, experts)
    return Call(operator="grouped_linear", dims=dims, may_narrow=True)


def _attention(block: BlockSpec, sizes: _Sizes, hidden: int, *, serves: bool) -> list[Call]:
    part, strategy, tokens = block.attention, sizes.strategy, sizes.tokens
    *ways_in, way_out = attention_products(BlockWidths.of(block, hidden), strategy.tp)
    calls = []
    for product in ways_in:
        if product.norm:
            calls.append(Call(operator="rms_norm", dims=(sizes.rows, product.depth)))
        calls.append(_linear(product, sizes.rows if product.sliced is Sliced.NOT else tokens))
    if serves and part.latent is None:
        calls += _stored_heads(part, sizes)
    else:
        calls += _placed_heads(part, sizes, ways_in[0].columns)
    if not serves:
        calls.append(_scores(part, strategy))
    calls.append(_linear(way_out, tokens))
    return calls


def _stored_heads(part: AttentionSpec, sizes: _Sizes) -> list[Call]:
    """What a server does to heads before they meet the pages: one pass where norms allow it."""
    tp, tokens = sizes.strategy.tp, sizes.tokens
    heads, kv_heads = part.heads / tp, rank_kv_heads(part.kv_heads, tp)
    norm = part.qk_norm
    dims = (tokens, heads, kv_heads, part.head_dim)
    if norm is None:
        return [Call(operator="store_heads", dims=dims)]
    if norm.span == "head" and norm.norm.kind == "rms" and not norm.after_rotary:
        return [Call(operator="store_normed_heads", dims=dims)]
    return [*_head_norms(part, sizes), Call(operator="store_heads", dims=dims)]


def _head_norms(part: AttentionSpec, sizes: _Sizes) -> list[Call]:
    if part.qk_norm is None:
        return []
    tp = sizes.strategy.tp
    counts = (part.heads / tp, rank_kv_heads(part.kv_heads, tp))
    norm = part.qk_norm.norm
    return [_norm_call(norm, sizes.tokens * count, part.head_dim) for count in counts]


def _placed_heads(part: AttentionSpec, sizes: _Sizes, columns: Number) -> list[Call]:
    """Norms and rotations of heads, and what joins and parts them."""
    strategy, tokens = sizes.strategy, sizes.tokens
    if part.latent is None:
        # Backward joins the gradients of queries, keys and values for the one product: each part
        # is laid into zeros and the two are added, queries and keys were joined before.
        moved = tokens * columns
        calls = [Call(operator="add", dims=(moved,), times=0.0, backward_times=JOIN)]
    else:
        rotated = tokens * (part.heads / strategy.tp) * part.head_dim
        calls = [Call(operator="add", dims=(rotated,), times=2.0 / 3.0)]
    calls += _head_norms(part, sizes)
    if part.rotary is not None:
        calls += [
            Call(operator="rotary", dims=(tokens, count, part.rotary.dim))
            for count in rotated_heads(part, strategy.tp)
        ]
    return calls


def _scores(part: AttentionSpec, strategy: Strategy) -> Call:
    """The attention of whole sequences to themselves.

    A window is priced as short sequences of as many tokens and pairs in all, nearly twice its
    length: kernels work in tiles, whose edges a window has as short sequences have them.
    """
    length = strategy.sequence_length
    reach = length if part.window is None else np.minimum(length, part.window)
    pairs = reach * (reach + 1.0) / 2.0 + (length - reach) * reach
    alike = 2.0 * pairs / length - 1.0
    count = strategy.sequences / strategy.cp * (length / alike)
    heads, kv_heads = part.heads / strategy.tp, rank_kv_heads(part.kv_heads, strategy.tp)
    dims = (count, alike, heads, kv_heads, part.head_dim, part.value_dim)
    return Call(operator=_kernel_of(part), dims=dims)


def _kernel_of(part: AttentionSpec) -> str:
    """Return which kind of kernel attends: what is done to scores decides."""
    if part.soft_cap is not None:
        return "scored_attention"
    if part.sinks:
        return "sink_attention"
    return "attention" if part.alibi is None else "biased_attention"


def _feed_forward(
    name: str, sizes: _Sizes, hidden: int, width: Number, *, gated: bool
) -> list[Call]:
    ways = feed_forward_products(name, hidden, width, gated, tp=sizes.strategy.tp)
    return [
        _linear(ways[0], sizes.tokens),
        _activation(sizes.tokens, ways[1].depth, gated=gated),
        _linear(ways[1], sizes.tokens),
    ]


def _activation(rows: Number, width: Number, *, gated: bool) -> Call:
    return Call(operator="gated_activation" if gated else "activation", dims=(rows, width))


def _moe(part: MoeSpec, sizes: _Sizes, hidden: int) -> list[Call]:
    """The experts in balance: every tensor-parallel rank routes its own tokens."""
    strategy = sizes.strategy
    own = sizes.tokens / strategy.tp
    local = np.maximum(part.experts / strategy.ep, 1.0)
    top, rows = part.experts_per_token, own * part.experts_per_token
    way_in, way_out = feed_forward_products("moe.experts", hidden, part.hidden, part.gated)
    calls = [
        _linear(router_product(hidden, part.experts), own, may_narrow=False),
        Call(operator="route", dims=(own, part.experts, top)),
        Call(operator="permute", dims=(own, hidden, top)),
        _grouped(rows, way_in.columns, hidden, local),
        _activation(rows, part.hidden, gated=part.gated),
        _grouped(rows, hidden, way_out.depth, local),
        Call(operator="unpermute", dims=(own, hidden, top)),
    ]
    if part.bias:  # added to rows, and summed over them on the way back
        sizes_of = rows * way_in.columns + rows * hidden
        calls.append(Call(operator="add", dims=(sizes_of,), times=2.0 / 3.0, backward_times=0.4))
    if part.shared_hidden:
        calls += _feed_forward("moe.shared", sizes, hidden, part.shared_hidden, gated=part.gated)
        calls.append(Call(operator="add", dims=(sizes.rows * hidden,)))
    return calls


def embedding_calls(spec: ModelSpec, strategy: Strategy) -> list[Call]:
    """Return the operators of unit 0."""
    sizes, part = _Sizes.of(strategy), spec.embedding
    vocabulary = np.ceil(spec.vocab / strategy.tp)
    calls = [Call(operator="embedding", dims=(sizes.tokens, part.dim, vocabulary))]
    if part.dim != spec.hidden:
        calls.append(Call(operator="linear", dims=(sizes.rows, spec.hidden, part.dim)))
    if part.positions:
        calls.append(Call(operator="embedding", dims=(sizes.rows, spec.hidden, part.positions)))
        calls.append(Call(operator="add", dims=(sizes.rows * spec.hidden,), backward_times=0.0))
    if part.norm is not None:
        calls.append(_norm_call(part.norm, sizes.rows, spec.hidden))
    return calls


def head_calls(spec: ModelSpec, strategy: Strategy) -> list[Call]:
    """Return the operators of the last unit: norm, head and cross-entropy."""
    sizes, width = _Sizes.of(strategy), spec.embedding.dim
    calls = []
    if spec.head.norm is not None:
        calls.append(_norm_call(spec.head.norm, sizes.rows, spec.hidden))
    if width != spec.hidden:
        calls.append(Call(operator="linear", dims=(sizes.rows, width, spec.hidden)))
    if spec.head.scores:
        return [*calls, Call(operator="linear", dims=(sizes.rows, 1, width))]
    vocabulary = np.ceil(spec.vocab / strategy.tp)
    calls.append(Call(operator="linear_cross_entropy", dims=(sizes.tokens, vocabulary, width)))
    if spec.answers:  # their sums come first
        dims = (sizes.tokens, vocabulary, width)
        calls.append(Call(operator="linear", dims=dims, backward_times=0.0))
    if spec.taught:
        passes = DIVERGENCE_PASSES / 3.0 * 2.0  # of a sum of two tensors in half precision
        count = (sizes.tokens * vocabulary,)
        calls.append(Call(operator="add", dims=count, times=passes, backward_times=0.0))
    return [*calls, *_teacher_calls(spec.teacher, strategy)] if spec.teacher else calls


def _teacher_calls(spec: ModelSpec, strategy: Strategy) -> list[Call]:
    """Return the forward passes of a teacher beside the head."""
    sizes, width = _Sizes.of(strategy), spec.embedding.dim
    blocks = range(spec.head_unit)
    calls = [call for unit in blocks for call in unit_calls(spec, unit, strategy)]
    dims = (sizes.tokens, np.ceil(spec.vocab / strategy.tp), width)
    calls.append(Call(operator="linear", dims=dims))
    return [replace(call, backward_times=0.0) for call in calls]


def unit_calls(spec: ModelSpec, unit: int, strategy: Strategy) -> list[Call]:
    """Return the operators of any unit."""
    if unit == 0:
        return embedding_calls(spec, strategy)
    if unit == spec.head_unit:
        return head_calls(spec, strategy)
    return block_calls(spec, spec.block(unit), strategy)
