"""The operators of each unit, and the model FLOPs per token that MFU is defined by."""

from __future__ import annotations

import functools
from dataclasses import replace

from tutti.errors import InputError
from tutti.models.anatomy import (
    BlockWidths,
    attention_products,
    block_norm_names,
    feed_forward_products,
    rank_kv_heads,
    rotated_heads,
    router_product,
)
from tutti.models.builder import FLOAT_BYTES, MASK_BYTES, Builder
from tutti.models.operators import (
    NO_WORK,
    AttentionShape,
    Kept,
    Operator,
    OperatorKind,
    Workload,
)
from tutti.models.parts import AttentionSpec, BlockSpec, MoeSpec, Residual
from tutti.models.spec import ModelSpec
from tutti.models.tuned_operators import tuned_operators

DIVERGENCE_PASSES = 16.0  # over a chunk of logits: two softmaxes, terms, slopes


def unit_operators(spec: ModelSpec, unit: int, work: Workload) -> tuple[Operator, ...]:
    """Return what one rank computes for one micro-batch in a unit, in order."""
    problem = spec.tensor_parallel_problem(work.tp)
    if problem is not None:
        raise InputError(f"{spec.name}: {problem}")
    if not 0 <= unit <= spec.head_unit:
        raise InputError(f"{spec.name}: there is no unit {unit}; units are 0 to {spec.head_unit}")
    for block in spec.blocks:
        if block.moe is not None and block.moe.hidden % work.experts_tp:
            raise InputError(
                f"{spec.name}: experts of width {block.moe.hidden} cannot be cut "
                f"{work.experts_tp} ways"
            )
    if unit == 0:
        operators = _embedding(spec, work)
    elif unit == spec.head_unit:
        operators = _head(spec, work)
    else:
        operators = _block(spec, spec.layer_blocks[unit - 1], work)
    if spec.tuning is not None:
        operators = tuned_operators(spec, unit, work, operators)
    if spec.teacher is not None and unit == spec.head_unit:
        operators = (*operators, *_teacher(spec.teacher, work))
    return operators


@functools.lru_cache(maxsize=256)
def _teacher(spec: ModelSpec, work: Workload) -> tuple[Operator, ...]:
    """Return what a teacher beside the head computes: its forward passes, of which nothing stays.

    Its experts are sliced as the head's rank is, and its tokens are whole.
    """
    beside = replace(work, ep=1, expert_tp=None, sequence_parallel=False)
    return tuple(
        replace(op, name=f"teacher {op.name}", backward_input=NO_WORK, backward_weight=NO_WORK,
                kept=())
        for unit in range(spec.num_units)
        for op in unit_operators(spec, unit, beside)
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def matmul_parameters(spec: ModelSpec) -> int:
    """Return N: what a token is multiplied with, the head included, of experts its own."""
    return sum(
        p.activated_size * p.matmul_uses
        for unit in range(spec.num_units)
        for p in spec.parameters(unit)
    )


@functools.lru_cache(maxsize=256)
def attention_flops_per_token(spec: ModelSpec, sequence_length: int) -> float:
    """Return Σ_layers heads·(d_qk + d_v)·min(sequence, window)."""
    blocks = [spec.block(unit) for unit in range(1, spec.num_layers + 1)]
    blocks += [blocks[-1]] * spec.prediction_heads
    return float(
        sum(
            b.attention.heads
            * (b.attention.head_dim + b.attention.value_dim)
            * b.attention.context(sequence_length)
            for b in blocks
        )
    )


def flops_per_token(spec: ModelSpec, sequence_length: int) -> float:
    """Return the model FLOPs of training on one token: 6·N + 6·Σ heads·(d_qk + d_v)·context.

    Of what is frozen, 4·N: its weights have no gradients.
    """
    products = 6.0 * matmul_parameters(spec) - 2.0 * _frozen_matmul_parameters(spec)
    return products + 6.0 * attention_flops_per_token(spec, sequence_length)


@functools.lru_cache(maxsize=256)
def _frozen_matmul_parameters(spec: ModelSpec) -> int:
    """Return what of N has no weight gradient."""
    units = range(spec.num_units) if spec.tuning is not None else ()
    frozen = (p for unit in units for p in spec.parameters(unit) if not p.trainable)
    return sum(p.activated_size * p.matmul_uses for p in frozen)


# --- the ends --------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _embedding(spec: ModelSpec, work: Workload) -> tuple[Operator, ...]:
    build, part = Builder(work), spec.embedding
    elements = work.own_tokens * spec.hidden
    build.embedding("token", work.tokens * part.dim)
    if part.dim != spec.hidden:
        kept = (build.keep("project_in input", work.own_tokens * part.dim),)
        build.gemm("project_in", work.own_tokens, spec.hidden, part.dim, kept=kept)
    if part.positions:
        build.embedding("position", elements)
        build.elementwise("position add", elements)
    if part.scale != 1:
        build.elementwise("scale", elements, inputs=1)
    if part.norm is not None:
        build.norm("norm", work.own_tokens, spec.hidden)
    if spec.dropout.embedding:
        build.dropout("dropout", elements)
    return tuple(build.operators)


@functools.lru_cache(maxsize=4096)
def _head(spec: ModelSpec, work: Workload) -> tuple[Operator, ...]:
    build = Builder(work)
    if spec.head.norm is not None:
        build.norm("norm", work.own_tokens, spec.hidden)
    _logits(build, spec)
    for head in range(spec.prediction_heads):
        _prediction_head(build, spec, f"prediction.{head}.")
    return tuple(build.operators)


def _logits(build: Builder, spec: ModelSpec) -> None:
    work, width = build.work, spec.embedding.dim
    rows, fused = work.own_tokens, work.fused_cross_entropy
    if width != spec.hidden:
        kept = (build.keep("project_out input", rows * spec.hidden),)
        build.gemm("project_out", rows, width, spec.hidden, kept=kept)
    if spec.head.scores:  # of the last token of each text; the stream of the others is not read
        kept = (build.keep("score input", rows * width),)
        build.gemm("score", rows, 1, width, kept=kept)
        return
    vocab = spec.outputs(work.tp)
    # Where forward makes the gradients, that of the input stays in the input's place.
    kept = (build.keep("logits input", (work.tokens if fused else rows) * width),)
    build.gemm("logits", work.tokens, vocab, width, kept=kept)
    if spec.answers:  # their sums come first
        build.forward_gemm("logits of answers", work.tokens, vocab, width)
    elements = work.tokens * vocab
    if spec.head.logit_divisor != 1:
        build.elementwise("logit divisor", elements, inputs=1)
    if spec.head.soft_cap is not None:
        build.elementwise("logit soft cap", elements, inputs=1)
    if spec.taught:  # both distributions and the slopes between them, in single precision
        build.memory_bound(
            "divergence", OperatorKind.CROSS_ENTROPY, elements,
            forward=DIVERGENCE_PASSES * FLOAT_BYTES, backward=0.0,
        )  # fmt: skip
    e = work.element_bytes
    single = () if fused else (Kept(name="logits", bytes=FLOAT_BYTES * elements),)
    build.memory_bound(  # a single-precision copy is written, and read for maximum and sum
        "cross_entropy",
        OperatorKind.CROSS_ENTROPY,
        elements,
        forward=e if fused else e + 3 * FLOAT_BYTES,
        backward=2 * e if fused else e + FLOAT_BYTES,
        kept=single,
    )


def _prediction_head(build: Builder, spec: ModelSpec, prefix: str) -> None:
    work, hidden = build.work, spec.hidden
    build.prefix = prefix
    build.embedding("token", work.tokens * spec.embedding.dim)
    build.norm("embedding_norm", work.own_tokens, hidden)
    build.norm("hidden_norm", work.own_tokens, hidden)
    kept = (build.keep("project input", work.own_tokens * 2 * hidden),)
    build.gemm("project", work.own_tokens, hidden, 2 * hidden, kept=kept)
    add_block(build, spec, spec.block(spec.num_layers))
    build.norm("norm", work.own_tokens, hidden)
    _logits(build, spec)
    build.prefix = ""


# --- the block -------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _block(spec: ModelSpec, index: int, work: Workload) -> tuple[Operator, ...]:
    build = Builder(work)
    add_block(build, spec, spec.blocks[index])
    return tuple(build.operators)


def add_block(build: Builder, spec: ModelSpec, block: BlockSpec) -> None:
    """Add attention and feed-forward layer with the norms and residuals around them."""
    work, hidden = build.work, spec.hidden
    rows, elements = work.own_tokens, work.own_tokens * spec.hidden
    norms = block_norm_names(block)
    shared = block.residual is Residual.PARALLEL_ONE_NORM
    build.known = {"mlp input"} if shared else set()  # where it is attention's
    for half in ("attention", "mlp"):
        if f"{half}_norm" in norms:
            build.norm(f"{half}_norm", rows, hidden)
        if half == "attention":
            _attention(build, spec, block)
        elif block.mlp is not None:
            _mlp(build, "mlp", hidden, block.mlp.hidden, gated=block.mlp.gated)
        if half == "mlp" and block.moe is not None:
            _moe(build, block.moe, hidden)
        if spec.dropout.residual:
            build.dropout(f"{half} dropout", elements)
        if block.residual_multiplier != 1:
            build.elementwise(f"{half} multiplier", elements, inputs=1)
        if f"{half}_post_norm" in norms:
            build.norm(f"{half}_post_norm", rows, hidden)
        build.elementwise(f"{half} residual", elements)


# --- attention -------------------------------------------------------------------------------


def _attention(build: Builder, spec: ModelSpec, block: BlockSpec) -> None:
    work, part = build.work, block.attention
    heads, kv_heads = part.heads // work.tp, int(rank_kv_heads(part.kv_heads, work.tp))
    *ways_in, way_out = attention_products(BlockWidths.of(block, spec.hidden), work.tp)
    for product in ways_in:
        if product.norm:  # of a latent, which is whole on every tensor-parallel rank
            build.norm(product.norm, work.own_tokens, product.depth)
        build.product(product)
    if part.qk_norm is not None:
        build.norm("attention.qk_norm", work.tokens, (heads + kv_heads) * part.head_dim)
    if part.rotary is not None:
        elements = work.tokens * int(sum(rotated_heads(part, work.tp))) * part.rotary.dim
        e = work.element_bytes
        build.memory_bound(
            "attention.rotary", OperatorKind.ROTARY, elements, forward=2 * e, backward=2 * e
        )
    shape = AttentionShape(
        sequences=work.sequences,
        query_length=work.sequence_length // work.cp,
        key_length=work.sequence_length,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=part.head_dim,
        value_dim=part.value_dim,
        window=part.window,
    )
    if work.fused_attention:
        build.attention("attention", shape, context=part.context(work.sequence_length))
    else:
        _materialised_attention(build, part, shape, spec.dropout.attention > 0)
    build.product(way_out)


def _materialised_attention(
    build: Builder, part: AttentionSpec, shape: AttentionShape, dropout: bool
) -> None:
    """Add attention that writes its scores; what that keeps is Korthikanti et al. 2022, §4.1."""
    batch = shape.sequences * shape.heads
    rows, columns = shape.query_length, shape.key_length
    scores, e = batch * rows * columns, build.work.element_bytes
    tokens = shape.sequences * shape.query_length
    inputs = (
        build.keep("query", tokens * shape.heads * shape.head_dim),
        build.keep("key", tokens * shape.kv_heads * shape.head_dim),
    )
    build.batched_gemm("attention.scores", batch, rows, columns, shape.head_dim, kept=inputs)
    if part.soft_cap is not None:
        capped = (build.keep("capped scores", scores, core=True),)
        build.memory_bound(
            "attention.soft_cap",
            OperatorKind.ELEMENTWISE,
            scores,
            forward=2 * e,
            backward=3 * e,
            core=True,
            kept=capped,
        )
    build.memory_bound(
        "attention.softmax",
        OperatorKind.SOFTMAX,
        scores,
        forward=2 * e,
        backward=3 * e,
        core=True,
        kept=(build.keep("softmax output", scores, core=True),),
    )
    if dropout:
        mask = Kept(
            name=f"{build.prefix}attention mask", bytes=MASK_BYTES * scores, core_attention=True
        )
        build.memory_bound(
            "attention.dropout",
            OperatorKind.ELEMENTWISE,
            scores,
            forward=2 * e + MASK_BYTES,
            backward=2 * e + MASK_BYTES,
            core=True,
            kept=(mask, build.keep("dropout output", scores, core=True)),
        )
    values = (build.keep("value", tokens * shape.kv_heads * shape.value_dim),)
    build.batched_gemm("attention.values", batch, rows, shape.value_dim, columns, kept=values)


# --- feed-forward ----------------------------------------------------------------------------


def _mlp(build: Builder, name: str, hidden: int, width: int, *, gated: bool) -> None:
    work = build.work
    way_in, way_out = feed_forward_products(name, hidden, width, gated, tp=work.tp)
    build.product(way_in)
    build.activation(f"{name}.activation", work.tokens, int(way_out.depth), gated=gated)
    build.product(way_out)


def expert_rows(part: MoeSpec, work: Workload) -> int:
    """Return how many (token, expert) rows a rank computes when the experts are in balance."""
    return -(-work.tokens * part.experts_per_token * work.experts_tp // work.tp)


def _moe(build: Builder, part: MoeSpec, hidden: int) -> None:
    rows, e = build.work.own_tokens, build.work.element_bytes
    build.product(router_product(hidden, part.experts))
    scores = (Kept(name=f"{build.prefix}router scores", bytes=FLOAT_BYTES * rows * part.experts),)
    build.memory_bound(
        "moe.routing",
        OperatorKind.ROUTING,
        rows * part.experts,
        forward=3 * FLOAT_BYTES,
        backward=3 * FLOAT_BYTES,
        kept=scores,
    )
    _experts(build, part, hidden)
    if part.shared_hidden:
        _mlp(build, "moe.shared", hidden, part.shared_hidden, gated=part.gated)
        if part.shared_gate:
            build.gemm("moe.shared_gate", rows, 1, hidden)
            build.memory_bound(
                "moe.shared_gate multiply",
                OperatorKind.ELEMENTWISE,
                rows * hidden,
                forward=2 * e,
                backward=3 * e,
                kept=(build.keep("shared output", rows * hidden),),
            )
        build.elementwise("moe.shared add", rows * hidden)


def _experts(build: Builder, part: MoeSpec, hidden: int) -> None:
    """Add dispatch, grouped products and combination; what travels is the cost model's matter."""
    work = build.work
    rows, local = expert_rows(part, work), -(-part.experts // work.ep)
    way_in, way_out = feed_forward_products(
        "moe.experts", hidden, part.hidden, part.gated, tp=work.experts_tp, reads="experts input"
    )
    build.move("moe.permute", rows * hidden)
    build.product(way_in, rows=rows, count=local)
    build.activation("moe.experts.activation", rows, int(way_out.depth), gated=part.gated)
    build.product(way_out, rows=rows, count=local)
    # the gradient of a token's expert weights needs the experts' outputs
    outputs = (build.keep("experts output", rows * hidden),)
    build.move("moe.unpermute", rows * hidden, kept=outputs)
