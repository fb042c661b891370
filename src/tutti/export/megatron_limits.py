"""What Megatron-LM's flags cannot say of a model, each in a few words.

`export_model` refuses such a model; the flags themselves are its business.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tutti.models.parts import (
    Activation,
    AttentionSpec,
    BlockSpec,
    MlpSpec,
    MoeSpec,
    NormSpec,
    Placement,
    Residual,
    RotarySpec,
)
from tutti.models.spec import ModelSpec
from tutti.plan.job import Job

# What --use-rope-scaling fixes besides the factor.
_LLAMA3 = {"low_frequency_factor": 1.0, "high_frequency_factor": 4.0, "original_length": 8192}
# Activations that flags can say, and whether they are gated.
ACTIVATIONS = frozenset(
    {
        (Activation.SILU, True),
        (Activation.GELU_TANH, False),
        (Activation.GELU, False),
        (Activation.RELU2, False),
        (Activation.QUICK_GELU, True),
        (Activation.CLAMPED_SWIGLU, True),
    }
)


def model_problems(model: ModelSpec, blocks: Sequence[BlockSpec], job: Job) -> Iterator[str]:
    """Yield what is special about a model, given the block of every layer."""
    first, head, embedding = blocks[0], model.head, model.embedding
    attention = replace(first.attention, window=None)
    if any(replace(block.attention, window=None) != attention for block in blocks):
        yield "its layers differ in attention"
    if any(block.norm != first.norm for block in blocks) or head.norm != first.norm:
        yield "its norms differ"
    if any(block.placement is not Placement.PRE for block in blocks):
        yield f"its norms stand in {first.placement} position"
    if any(block.residual is not Residual.SEQUENTIAL for block in blocks):
        yield "attention and feed-forward layer are parallel"
    if any(block.residual_multiplier != 1 for block in blocks):
        yield "it scales the residual stream"
    if embedding.dim != model.hidden or embedding.norm or embedding.scale != 1:
        yield "its embedding is projected, normed or scaled"
    if embedding.position_offset:
        yield f"its learned positions begin at row {embedding.position_offset}"
    if embedding.positions and job.sequence_length > embedding.positions:
        yield f"sequences of {job.sequence_length} pass its {embedding.positions} positions"
    if head.bias or head.logit_divisor != 1 or head.soft_cap:
        yield "its head has a bias, a divisor or a soft cap"
    if model.dropout.embedding != model.dropout.residual:
        yield "dropout after the embedding is not that of the residual stream"
    yield from _norm_problems(first.norm)
    yield from _attention_problems(blocks)
    yield from _feed_forward_problems(blocks)


def _norm_problems(norm: NormSpec) -> Iterator[str]:
    if not norm.affine or (norm.kind == "layer" and not norm.bias):
        yield "its layer norm lacks weight or bias"


def _attention_problems(blocks: Sequence[BlockSpec]) -> Iterator[str]:
    attention = blocks[0].attention
    windows = {block.attention.window for block in blocks} - {None}
    if len(windows) > 1 or (windows and attention.window_kind != "sliding"):
        yield "its attention windows are chunked or differ"
    if attention.alibi is not None:
        yield "it has ALiBi positions"
    if attention.soft_cap is not None:
        yield "it caps attention scores"
    norm = attention.qk_norm
    if norm is not None and (norm.span != "head" or norm.after_rotary):
        yield "its norm of queries and keys is not per head before the rotation"
    usual = math.isclose(attention.softmax_scale, attention.head_dim**-0.5)
    if attention.latent is None and not usual:
        yield f"its attention scale is {attention.softmax_scale:g}"
    if attention.latent is not None and attention.latent.bias:
        yield "its latent projections have a bias"
    if attention.rotary is not None:
        yield from _rotary_problems(attention.rotary, attention)


def _rotary_problems(rotary: RotarySpec, attention: AttentionSpec) -> Iterator[str]:
    scaling = rotary.scaling
    if rotary.theta != int(rotary.theta):
        yield f"its rotary base {rotary.theta} is no whole number"
    if scaling is None:
        return
    if scaling.kind == "llama3":
        if any(getattr(scaling, name) != value for name, value in _LLAMA3.items()):
            yield "its llama3 rotary scaling has other constants than 1, 4 and 8192"
    elif scaling.kind == "linear":
        if scaling.factor != int(scaling.factor):
            yield f"its rotary interpolation factor {scaling.factor} is no whole number"
    elif scaling.kind != "yarn" or attention.latent is None:
        yield f"its rotary scaling is {scaling.kind}"


def _feed_forward_problems(blocks: Sequence[BlockSpec]) -> Iterator[str]:
    dense = {block.mlp for block in blocks if block.mlp is not None}
    sparse = {block.moe for block in blocks if block.moe is not None}
    if len(dense) > 1 or len(sparse) > 1:
        yield "its feed-forward layers differ"
        return
    layers: list[MlpSpec | MoeSpec] = [*dense, *sparse]
    kinds = {(layer.activation, layer.gated) for layer in layers}
    for activation, gated in kinds:
        if (activation, gated) not in ACTIVATIONS:
            yield f"its activation is {'gated ' if gated else ''}{activation}"
    if len(kinds) > 1:
        yield "experts and dense layers have different activations"
    if len(set(linear_biases(blocks))) > 1 and not only_qkv_bias(blocks):
        yield "some linear layers have a bias and others none"
    for moe in sparse:
        yield from _router_problems(moe)


def _router_problems(moe: MoeSpec) -> Iterator[str]:
    router = moe.router
    if moe.shared_gate:
        yield "its shared experts have a gate"
    if router.scores == "near_softmax":
        yield "its router weighs an expert among those near it"
    if router.bias and not moe.bias:
        yield "its router has a bias"
    if router.scores == "sigmoid" and not router.normalize and moe.experts_per_token > 1:
        yield "its sigmoid router does not normalise"
    if router.scores != "sigmoid" and router.scale != 1 and is_normalised(moe):
        yield "its softmax router normalises and scales"
    if router.groups > 1:
        counted = moe.experts_per_token // router.top_groups
        if {"max": 1, "top2": 2}[router.group_score] != counted:
            yield f"its router scores groups by {router.group_score}, not by {counted} experts"


def is_normalised(moe: MoeSpec) -> bool:
    """Tell whether the chosen weights sum to one, as a softmax over the chosen makes them."""
    return moe.router.normalize or moe.router.scores == "topk_softmax"


def linear_biases(blocks: Sequence[BlockSpec]) -> Iterator[bool]:
    """Yield for every linear layer of the blocks whether it has a bias."""
    for block in blocks:
        yield block.attention.output_bias
        if block.attention.latent is None:
            yield block.attention.qkv_bias
        layer = block.mlp or block.moe
        if layer is not None:
            yield layer.bias


def only_qkv_bias(blocks: Sequence[BlockSpec]) -> bool:
    """Tell whether the projections to queries, keys and values alone have a bias."""
    plain = [replace(b, attention=replace(b.attention, qkv_bias=False)) for b in blocks]
    return all(b.attention.qkv_bias for b in blocks) and not any(linear_biases(plain))
