"""GPT-2, GPT-NeoX, OPT, Bloom and Falcon: layer norms, plain feed-forward, names of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tutti.models.config import Config
from tutti.models.families.decoder import (
    ACTIVATIONS,
    Attention,
    Decoder,
    Mlp,
    assemble,
    layer_norm,
    padding_row,
)
from tutti.models.families.registry import register
from tutti.models.parts import (
    Activation,
    AlibiSpec,
    AttentionSpec,
    BlockSpec,
    DropoutSpec,
    EmbeddingSpec,
    HeadSpec,
    MlpSpec,
    NormSpec,
    Placement,
    Residual,
)
from tutti.models.rotary import RotaryForm
from tutti.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnReader:
    """A type that shares too little with Llama to be declared as a difference."""

    model_type: str
    defaults: Mapping[str, object]
    reader: Callable[[Config, str], ModelSpec]

    def read(self, config: Config, name: str) -> ModelSpec:
        """Return the model that a config describes."""
        return self.reader(config, name)


# --- GPT-NeoX --------------------------------------------------------------------------------


def _neox_residual(config: Config) -> Residual:
    parallel = config.flag("use_parallel_residual")
    return Residual.PARALLEL_TWO_NORMS if parallel else Residual.SEQUENTIAL


def _neox_dropout(config: Config) -> DropoutSpec:
    hidden = config.probability("hidden_dropout")
    attention = config.probability("attention_dropout")
    return DropoutSpec(attention=attention, residual=hidden, embedding=hidden)


GPT_NEOX = Decoder(
    model_type="gpt_neox",
    has_padding=False,
    differs={
        "hidden_act": "gelu",
        "hidden_dropout": 0.0,
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
        "rotary_emb_base": 10_000.0,
        "rotary_pct": 0.25,
        "attention_bias": True,
    },
    norm=layer_norm("layer_norm_eps"),
    attention=Attention(
        rotary=RotaryForm(partial=True, theta_key="rotary_emb_base", partial_key="rotary_pct"),
        own_head_dim=False,
    ),
    feed_forward=Mlp(gated=False, bias=True),
    residual=_neox_residual,
    dropout=_neox_dropout,
    # NeoX has no grouped queries: a key that says so would not be obeyed
    refuse={"num_key_value_heads": (None,)},
)

# --- GPT-2 -----------------------------------------------------------------------------------


def _gpt2_scale(config: Config, head_dim: int, layer: int) -> float | None:
    scaled = config.flag("scale_attn_weights")
    by_layer = config.flag("scale_attn_by_inverse_layer_idx")
    if scaled and not by_layer:
        return None
    return (head_dim**-0.5 if scaled else 1.0) / (layer + 1 if by_layer else 1)


def _gpt2(config: Config, name: str) -> ModelSpec:
    norm = layer_norm("layer_norm_epsilon")(config)
    width = config.even_head_dim
    mlp = MlpSpec(
        hidden=config.maybe_integer("n_inner") or 4 * config.hidden,
        gated=False,
        activation=config.choice("activation_function", ACTIVATIONS),
        bias=True,
    )

    def block(layer: int) -> BlockSpec:
        attention = AttentionSpec(
            heads=config.heads,
            kv_heads=config.heads,
            head_dim=width,
            qkv_bias=True,
            output_bias=True,
            scale=_gpt2_scale(config, width, layer),
        )
        return BlockSpec(attention=attention, norm=norm, mlp=mlp)

    return assemble(
        config,
        name,
        "gpt2",
        block=block,
        embedding=EmbeddingSpec(dim=config.hidden, positions=config.max_length),
        head=HeadSpec(norm=norm, tied=config.flag("tie_word_embeddings")),
        dropout=DropoutSpec(
            attention=config.probability("attn_pdrop"),
            residual=config.probability("resid_pdrop"),
            embedding=config.probability("embd_pdrop"),
        ),
    )


# --- OPT -------------------------------------------------------------------------------------


def _opt(config: Config, name: str) -> ModelSpec:
    affine, bias = config.flag("layer_norm_elementwise_affine"), config.flag("enable_bias")
    norm = NormSpec(kind="layer", eps=1e-5, affine=affine, bias=affine)
    before = config.flag("do_layer_norm_before")
    block = BlockSpec(
        attention=AttentionSpec(
            heads=config.heads,
            kv_heads=config.heads,
            head_dim=config.even_head_dim,
            qkv_bias=bias,
            output_bias=bias,
        ),
        norm=norm,
        mlp=MlpSpec(
            hidden=config.integer("ffn_dim"),
            gated=False,
            activation=config.choice("activation_function", ACTIVATIONS),
            bias=bias,
        ),
        placement=Placement.PRE if before else Placement.POST,
    )
    final = before and not config.flag("_remove_final_layer_norm")
    return assemble(
        config,
        name,
        "opt",
        block=lambda _: block,
        embedding=EmbeddingSpec(
            dim=config.maybe_integer("word_embed_proj_dim") or config.hidden,
            positions=config.max_length + 2,
            position_offset=2,
            padding=padding_row(config),
        ),
        head=HeadSpec(norm=norm if final else None, tied=config.flag("tie_word_embeddings")),
        dropout=DropoutSpec(
            attention=config.probability("attention_dropout"),
            residual=config.probability("dropout"),
        ),
    )


# --- Bloom -----------------------------------------------------------------------------------


def _bloom(config: Config, name: str) -> ModelSpec:
    config.refuse_unless(
        "apply_residual_connection_post_layernorm",
        False,
        why="Bloom is modelled with residuals from before the norm",
    )
    norm = layer_norm("layer_norm_epsilon")(config)
    block = BlockSpec(
        attention=AttentionSpec(
            heads=config.heads,
            kv_heads=config.heads,
            head_dim=config.even_head_dim,
            qkv_bias=True,
            output_bias=True,
            alibi=AlibiSpec(),
        ),
        norm=norm,
        mlp=MlpSpec(
            hidden=4 * config.hidden, gated=False, activation=Activation.GELU_TANH, bias=True
        ),
    )
    return assemble(
        config,
        name,
        "bloom",
        block=lambda _: block,
        embedding=EmbeddingSpec(dim=config.hidden, norm=norm),
        head=HeadSpec(norm=norm, tied=config.flag("tie_word_embeddings")),
        dropout=DropoutSpec(
            attention=config.probability("attention_dropout"),
            residual=config.probability("hidden_dropout"),
        ),
    )


# --- Falcon ----------------------------------------------------------------------------------


def _falcon_residual(config: Config) -> Residual:
    new, parallel = config.flag("new_decoder_architecture"), config.flag("parallel_attn")
    norms = config.maybe_integer("num_ln_in_parallel_attn", maximum=2)
    if new and not parallel:
        raise config.wrong("parallel_attn", False, "true with 'new_decoder_architecture'")
    if not parallel:
        return Residual.SEQUENTIAL
    if norms == 2 and not new:
        raise config.wrong("num_ln_in_parallel_attn", 2, "1 without 'new_decoder_architecture'")
    two = new and norms != 1
    return Residual.PARALLEL_TWO_NORMS if two else Residual.PARALLEL_ONE_NORM


def _falcon_kv_heads(config: Config) -> int:
    if config.flag("new_decoder_architecture"):
        return config.maybe_integer("num_kv_heads") or config.heads
    return 1 if config.flag("multi_query") else config.heads


def _falcon(config: Config, name: str) -> ModelSpec:
    norm = layer_norm("layer_norm_epsilon")(config)
    bias, alibi, width = config.flag("bias"), config.flag("alibi"), config.even_head_dim
    block = BlockSpec(
        attention=AttentionSpec(
            heads=config.heads,
            kv_heads=_falcon_kv_heads(config),
            head_dim=width,
            qkv_bias=bias,
            output_bias=bias,
            rotary=None if alibi else RotaryForm().read(config, width),
            alibi=AlibiSpec(scaled=True, bfloat16=True) if alibi else None,
        ),
        norm=norm,
        mlp=MlpSpec(
            hidden=config.maybe_integer("ffn_hidden_size") or 4 * config.hidden,
            gated=False,
            activation=config.choice("activation", ACTIVATIONS),
            bias=bias,
        ),
        residual=_falcon_residual(config),
    )
    return assemble(
        config,
        name,
        "falcon",
        block=lambda _: block,
        embedding=EmbeddingSpec(dim=config.hidden),
        head=HeadSpec(norm=norm, tied=config.flag("tie_word_embeddings")),
        dropout=DropoutSpec(
            attention=config.probability("attention_dropout"),
            residual=config.probability("hidden_dropout"),
        ),
    )


register(
    GPT_NEOX,
    OwnReader(
        model_type="gpt2",
        defaults={
            "n_positions": 1024,
            "n_inner": None,
            "activation_function": "gelu_new",
            "resid_pdrop": 0.1,
            "embd_pdrop": 0.1,
            "attn_pdrop": 0.1,
            "layer_norm_epsilon": 1e-5,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "tie_word_embeddings": True,
        },
        reader=_gpt2,
    ),
    OwnReader(
        model_type="opt",
        defaults={
            "max_position_embeddings": 2048,
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "word_embed_proj_dim": None,
            "dropout": 0.1,
            "attention_dropout": 0.0,
            "activation_function": "relu",
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "tie_word_embeddings": True,
            "pad_token_id": 1,
        },
        reader=_opt,
    ),
    OwnReader(
        model_type="bloom",
        defaults={
            "max_position_embeddings": 2048,  # ALiBi has no limit; what Bloom was trained with
            "layer_norm_epsilon": 1e-5,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
        },
        reader=_bloom,
    ),
    OwnReader(
        model_type="falcon",
        defaults={
            "max_position_embeddings": 2048,
            "rope_theta": 10_000.0,
            "num_ln_in_parallel_attn": None,
            "layer_norm_epsilon": 1e-5,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "num_kv_heads": None,
            "alibi": False,
            "new_decoder_architecture": False,
            "multi_query": True,
            "parallel_attn": True,
            "bias": False,
            "ffn_hidden_size": None,
            "activation": "gelu",
            "tie_word_embeddings": True,
        },
        reader=_falcon,
    ),
)
