"""A GPT or Llama shape given by numbers, as papers and tables of published runs give it."""

from __future__ import annotations

from typing import Literal

from tutti.errors import InputError
from tutti.models.config import MOST, MOST_LAYERS
from tutti.models.parts import (
    Activation,
    AttentionSpec,
    BlockSpec,
    DropoutSpec,
    EmbeddingSpec,
    HeadSpec,
    MlpSpec,
    MoeSpec,
    NormSpec,
    RotarySpec,
    RouterSpec,
)
from tutti.models.spec import ModelSpec

Style = Literal["gpt", "llama"]


def plain_gpt(
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int | None = None,
    ffn: int | None = None,
    gated_mlp: bool = False,
    vocab: int = 51200,
    sequence_length: int = 2048,
    experts: int | None = None,
    topk: int | None = None,
    style: Style | None = None,
    tied: bool | None = None,
    dropout: float | None = None,
    name: str = "plain",
) -> ModelSpec:
    """Return a plain decoder.

    `style` decides what numbers do not say: "gpt" has layer norms, learned positions, biases, GELU,
    tied embeddings and dropout 0.1, as Megatron's GPT; "llama" has RMSNorm, rotary positions, no
    biases, an untied head and no dropout. By default a gated feed-forward layer means "llama".
    """
    kv_heads, ffn = heads if kv_heads is None else kv_heads, 4 * hidden if ffn is None else ffn
    _check(
        name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab,
        sequence_length=sequence_length, experts=experts or 1, topk=topk or 1,
    )  # fmt: skip
    if bool(experts) != bool(topk):
        raise InputError(f"{name}: 'experts' is {experts} and 'topk' is {topk}; give both or none")
    gpt = (style or ("llama" if gated_mlp else "gpt")) == "gpt"
    rate = (0.1 if gpt else 0.0) if dropout is None else dropout
    if not 0 <= rate < 1:
        raise InputError(f"{name}: 'dropout' is {rate}; must be from 0 to below 1")
    try:
        block = _block(
            gpt=gpt,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=hidden // heads,
            ffn=ffn,
            gated=gated_mlp,
            experts=experts or 0,
            topk=topk or 0,
        )
        return ModelSpec(
            name=name,
            model_type="plain",
            num_layers=layers,
            hidden=hidden,
            vocab=vocab,
            max_length=sequence_length,
            embedding=EmbeddingSpec(dim=hidden, positions=sequence_length if gpt else 0),
            blocks=(block,),
            head=HeadSpec(norm=block.norm, tied=gpt if tied is None else tied),
            dropout=DropoutSpec(attention=rate, residual=rate, embedding=rate),
        )
    except ValueError as error:
        raise InputError(f"{name}: {error}") from None


def _check(name: str, **sizes: int) -> None:
    for key, value in sizes.items():
        most = MOST_LAYERS if key == "layers" else MOST
        if type(value) is not int or not 1 <= value <= most:
            raise InputError(f"{name}: '{key}' is {value}; must be a whole number, 1 to {most}")
    hidden, heads = sizes["hidden"], sizes["heads"]
    if hidden % heads:
        raise InputError(f"{name}: 'heads' is {heads}, which does not divide hidden={hidden}")


def _block(
    *,
    gpt: bool,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    gated: bool,
    experts: int,
    topk: int,
) -> BlockSpec:
    activation = Activation.SILU if gated else Activation.GELU
    moe = (
        MoeSpec(
            experts=experts,
            experts_per_token=topk,
            hidden=ffn,
            gated=gated,
            activation=activation,
            router=RouterSpec(normalize=True),
        )
        if experts
        else None
    )
    return BlockSpec(
        attention=AttentionSpec(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            qkv_bias=gpt,
            output_bias=gpt,
            rotary=None if gpt else RotarySpec(theta=10_000.0, dim=head_dim),
        ),
        norm=NormSpec(kind="layer" if gpt else "rms", eps=1e-5, bias=gpt),
        mlp=None if moe else MlpSpec(hidden=ffn, gated=gated, activation=activation, bias=gpt),
        moe=moe,
    )
