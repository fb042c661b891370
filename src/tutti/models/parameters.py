"""The parameter tensors of each unit: name, shape, class, and how they are sliced.

Linear weights are (out, in); expert weights (experts, out, in). Queries, keys and values, gate and
up are separate tensors here, whatever a checkpoint or an engine fuses them to. `attention.query`
stands for both forms of the query projection; a latent model has `query_down` and `query_up`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

from tutti.models.anatomy import BlockWidths, Sliced, attention_products, block_norm_names
from tutti.models.parameter import Interval, Parameter, ParameterClass, ParameterKind
from tutti.models.parts import (
    BlockSpec,
    EmbeddingSpec,
    HeadSpec,
    LatentSpec,
    MlpSpec,
    MoeSpec,
    NormSpec,
    QkNormSpec,
)

__all__ = ["Interval", "Parameter", "ParameterClass", "ParameterKind", "Units", "unit_parameters"]


class Units(Protocol):
    """What of a model its tensors follow from; a `ModelSpec` is one."""

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""

    @property
    def vocab(self) -> int:
        """Rows of the embedding."""

    @property
    def num_layers(self) -> int:
        """Blocks."""

    @property
    def prediction_heads(self) -> int:
        """Blocks that predict further tokens."""

    @property
    def embedding(self) -> EmbeddingSpec:
        """Unit 0."""

    @property
    def head(self) -> HeadSpec:
        """The last unit."""

    @property
    def head_unit(self) -> int:
        """Its number."""

    @property
    def tuning(self) -> Any:  # a `Tuning`, which is made of parameters
        """What of it is trained; None: everything."""

    def block(self, unit: int) -> BlockSpec:
        """Return a unit between them."""

    def __hash__(self) -> int: ...


@functools.lru_cache(maxsize=8192)
def unit_parameters(spec: Units, unit: int) -> tuple[Parameter, ...]:
    """Return the tensors of one unit of a model."""
    own = _own_parameters(spec, unit)
    if spec.tuning is None:
        return own
    tuned: tuple[Parameter, ...] = spec.tuning.of(unit, own, head=spec.head_unit)
    return tuned


def _own_parameters(spec: Units, unit: int) -> tuple[Parameter, ...]:
    if unit == 0:
        return _embedding_parameters(spec)
    if unit == spec.head_unit:
        return _head_parameters(spec)
    return _block_parameters(spec.block(unit), spec.hidden)


# --- small builders --------------------------------------------------------------------------


def _norm(name: str, norm: NormSpec | None, size: int) -> Iterator[Parameter]:
    if norm is not None and norm.affine:
        yield Parameter(name=f"{name}.weight", shape=(size,), kind=ParameterKind.NORM)
        if norm.bias:
            yield Parameter(name=f"{name}.bias", shape=(size,), kind=ParameterKind.NORM)


def _column(name: str, out: int, in_: int, *, bias: bool, parts: int) -> Iterator[Parameter]:
    """Yield a linear layer whose outputs are sliced."""
    weight = Parameter(
        name=f"{name}.weight",
        shape=(out, in_),
        kind=ParameterKind.LINEAR,
        slice_dim=0,
        slice_parts=parts,
        matmul_uses=1,
    )
    yield weight
    if bias:
        yield replace(
            weight, name=f"{name}.bias", shape=(out,), kind=ParameterKind.BIAS, matmul_uses=0
        )


def _row(name: str, out: int, in_: int, *, bias: bool, parts: int) -> Iterator[Parameter]:
    """Yield a linear layer whose inputs are sliced; its bias is added once, after the sum."""
    yield Parameter(
        name=f"{name}.weight",
        shape=(out, in_),
        kind=ParameterKind.LINEAR,
        slice_dim=1,
        slice_parts=parts,
        matmul_uses=1,
    )
    if bias:
        yield Parameter(name=f"{name}.bias", shape=(out,), kind=ParameterKind.BIAS)


def _whole(name: str, out: int, in_: int, *, bias: bool = False) -> Iterator[Parameter]:
    """Yield a linear layer that every tensor-parallel rank holds."""
    yield Parameter(
        name=f"{name}.weight", shape=(out, in_), kind=ParameterKind.LINEAR, matmul_uses=1
    )
    if bias:
        yield Parameter(name=f"{name}.bias", shape=(out,), kind=ParameterKind.BIAS)


# --- the block -------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _block_parameters(block: BlockSpec, hidden: int) -> tuple[Parameter, ...]:
    parameters = [*_block_norms(block, hidden), *_attention(block, hidden)]
    if block.mlp is not None:
        parameters += _mlp("mlp", block.mlp, hidden)
    if block.moe is not None:
        parameters += _moe(block.moe, hidden)
    return tuple(parameters)


def _block_norms(block: BlockSpec, hidden: int) -> Iterator[Parameter]:
    for name in block_norm_names(block):
        yield from _norm(name, block.norm, hidden)


def _attention(block: BlockSpec, hidden: int) -> Iterator[Parameter]:
    spec = block.attention
    heads, kv_heads, width = spec.heads, spec.kv_heads, spec.head_dim
    if spec.latent is not None:
        yield from _latent(block, spec.latent, hidden)
    else:
        for name, count in (("query", heads), ("key", kv_heads), ("value", kv_heads)):
            yield from _column(
                f"attention.{name}", count * width, hidden, bias=spec.qkv_bias, parts=count
            )
    if spec.qk_norm is not None:
        yield from _qk_norm("attention.query_norm", spec.qk_norm, heads, width)
        yield from _qk_norm("attention.key_norm", spec.qk_norm, kv_heads, width)
    if spec.sinks:
        yield Parameter(
            name="attention.sinks",
            shape=(heads,),
            kind=ParameterKind.OTHER,
            slice_dim=0,
            slice_parts=heads,
        )
    out = heads * spec.value_dim
    yield from _row("attention.output", hidden, out, bias=spec.output_bias, parts=heads)


def _latent(block: BlockSpec, latent: LatentSpec, hidden: int) -> Iterator[Parameter]:
    norm = NormSpec(eps=latent.norm_eps)
    for product in attention_products(BlockWidths.of(block, hidden))[:-1]:
        out, width = int(product.columns), product.depth
        if product.norm:
            yield from _norm(product.norm, norm, width)
        if product.sliced is Sliced.NOT:
            yield from _whole(product.name, out, width, bias=latent.bias)
        else:
            heads = block.attention.heads
            yield from _column(product.name, out, width, bias=False, parts=heads)


def _qk_norm(name: str, spec: QkNormSpec, heads: int, width: int) -> Iterator[Parameter]:
    whole = width if spec.span == "head" else heads * width
    for parameter in _norm(name, spec.norm, whole):
        if spec.span == "head":
            yield replace(parameter, in_part="always")
        else:
            yield replace(parameter, slice_dim=0, slice_parts=heads)


def _mlp(name: str, spec: MlpSpec, hidden: int) -> Iterator[Parameter]:
    for part in ("gate", "up") if spec.gated else ("up",):
        yield from _column(f"{name}.{part}", spec.hidden, hidden, bias=spec.bias, parts=spec.hidden)
    yield from _row(f"{name}.down", hidden, spec.hidden, bias=spec.bias, parts=spec.hidden)


def _moe(spec: MoeSpec, hidden: int) -> Iterator[Parameter]:
    for parameter in _whole("moe.router", spec.experts, hidden, bias=spec.router.bias):
        yield replace(parameter, in_part="spread")
    if spec.router.correction != "none":
        yield Parameter(
            name="moe.router.correction",
            shape=(spec.experts,),
            kind=ParameterKind.OTHER,
            trainable=False,
            buffer=spec.router.correction == "buffer",
        )
    expert = MlpSpec(hidden=spec.hidden, gated=spec.gated, bias=spec.bias)
    for parameter in _mlp("moe.experts", expert, hidden):
        cut = parameter.slice_dim
        yield replace(
            parameter,
            shape=(spec.experts, *parameter.shape),
            slice_dim=None if cut is None else cut + 1,
            in_part="always" if cut is None else "never",
            group=ParameterClass.EXPERT,
            experts=spec.experts,
            experts_per_token=spec.experts_per_token,
        )
    if spec.shared_hidden:
        shared = MlpSpec(hidden=spec.shared_hidden, gated=spec.gated, bias=spec.shared_bias)
        yield from _mlp("moe.shared", shared, hidden)
        if spec.shared_gate:
            yield from _whole("moe.shared_gate", 1, hidden)


# --- the ends --------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _embedding_parameters(spec: Units) -> tuple[Parameter, ...]:
    width, rows = spec.embedding.dim, spec.embedding.positions
    parameters = [_table("token.weight", spec.vocab, width)]
    if rows:
        parameters.append(
            Parameter(
                name="position.weight", shape=(rows, spec.hidden), kind=ParameterKind.EMBEDDING
            )
        )
    if width != spec.hidden:
        parameters += _whole("project_in", spec.hidden, width)
    parameters += _norm("norm", spec.embedding.norm, spec.hidden)
    return tuple(parameters)


def _table(name: str, vocab: int, width: int) -> Parameter:
    return Parameter(
        name=name,
        shape=(vocab, width),
        kind=ParameterKind.EMBEDDING,
        slice_dim=0,
        slice_parts=vocab,
    )


@functools.lru_cache(maxsize=1024)
def _head_parameters(spec: Units) -> tuple[Parameter, ...]:
    width = spec.embedding.dim
    parameters = [*_norm("norm", spec.head.norm, spec.hidden)]
    if width != spec.hidden:
        parameters += _whole("project_out", width, spec.hidden)
    if spec.head.scores:
        return (*parameters, *_whole("score", 1, width))
    weight, *bias = _column("logits", spec.vocab, width, bias=spec.head.bias, parts=spec.vocab)
    tied_to = "0.token.weight" if spec.head.tied else None
    uses = 1 + spec.prediction_heads
    parameters += [replace(weight, tied_to=tied_to, matmul_uses=uses), *bias]
    if spec.prediction_heads:
        table = _table("prediction.token.weight", spec.vocab, width)
        parameters.append(replace(table, tied_to="0.token.weight"))
    for head in range(spec.prediction_heads):
        parameters += _prediction_head(spec, f"prediction.{head}")
    return tuple(parameters)


def _prediction_head(spec: Units, prefix: str) -> Iterator[Parameter]:
    """One more block on (norm(hidden), norm(embedding of the next token)), as in DeepSeek-V3."""
    norm, hidden = spec.block(spec.num_layers).norm, spec.hidden
    yield from _norm(f"{prefix}.embedding_norm", norm, hidden)
    yield from _norm(f"{prefix}.hidden_norm", norm, hidden)
    yield from _whole(f"{prefix}.project", hidden, 2 * hidden)
    for parameter in _block_parameters(spec.block(spec.num_layers), hidden):
        yield replace(parameter, name=f"{prefix}.{parameter.name}")
    yield from _norm(f"{prefix}.norm", norm, hidden)
