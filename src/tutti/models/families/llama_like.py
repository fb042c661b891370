"""Dense types that differ from Llama in settings only."""

from __future__ import annotations

from collections.abc import Callable

from tutti.models.config import Config
from tutti.models.families.decoder import (
    Attention,
    Decoder,
    Mlp,
    layer_norm,
    rms_norm,
    same_window,
    typed_window,
)
from tutti.models.families.registry import register
from tutti.models.parts import DropoutSpec, NormSpec, Placement, QkNormSpec, Residual
from tutti.models.rotary import RotaryForm

PARTIAL = RotaryForm(partial=True)
INTERLEAVED = RotaryForm(interleaved=True)
PARTIAL_INTERLEAVED = RotaryForm(partial=True, interleaved=True)


def per_head_norm(config: Config) -> QkNormSpec:
    """RMSNorm on each query and key head, one weight for all."""
    return QkNormSpec(norm=rms_norm(config))


# --- Qwen: windows on the layers from max_window_layers on, if at all ------------------------


def qwen_slides(config: Config, layer: int) -> bool:
    """Tell whether a Qwen 2 or 3 layer slides where `layer_types` does not say."""
    return config.flag("use_sliding_window") and layer >= config.integer(
        "max_window_layers", minimum=0
    )


def qwen_window(config: Config, layer: int) -> int | None:
    """Return the window of a Qwen 2 or 3 layer."""
    if not config.flag("use_sliding_window"):
        return None
    return typed_window(qwen_slides)(config, layer)


QWEN_DEFAULTS: dict[str, object] = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

# --- StableLM --------------------------------------------------------------------------------


def _stablelm_qk_norm(config: Config) -> QkNormSpec | None:
    if not config.flag("qk_layernorm"):
        return None
    norm = NormSpec(kind="layer", eps=config.number("layer_norm_eps"))
    return QkNormSpec(norm=norm, span="heads")


def _phi_qk_norm(config: Config) -> QkNormSpec | None:
    if not config.flag("qk_layernorm"):
        return None
    return QkNormSpec(norm=layer_norm("layer_norm_eps")(config))


def _stablelm_residual(config: Config) -> Residual:
    parallel = config.flag("use_parallel_residual")
    return Residual.PARALLEL_ONE_NORM if parallel else Residual.SEQUENTIAL


# --- the others' small differences -----------------------------------------------------------


def olmo_qk_norm(config: Config) -> QkNormSpec:
    """RMSNorm across all query heads, and across all key heads."""
    return QkNormSpec(norm=rms_norm(config), span="all")


def _hunyuan_qk_norm(config: Config) -> QkNormSpec:
    return QkNormSpec(norm=rms_norm(config), after_rotary=True)


def dropouts(
    attention: str, residual: str, embedding: str | None = None
) -> Callable[[Config], DropoutSpec]:
    """Return a reader of dropout rates under these keys."""

    def read(config: Config) -> DropoutSpec:
        return DropoutSpec(
            attention=config.probability(attention),
            residual=config.probability(residual),
            embedding=config.probability(embedding) if embedding else 0.0,
        )

    return read


_GLM_DEFAULTS: dict[str, object] = {
    "pad_token_id": 151329,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}

register(
    Decoder(model_type="llama", feed_forward=Mlp(bias="mlp_bias")),
    Decoder(
        model_type="mistral",
        differs={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        attention=Attention(qkv_bias=False, output_bias=False, window=same_window),
        feed_forward=Mlp(bias=False),
    ),
    Decoder(
        model_type="qwen2",
        differs=QWEN_DEFAULTS,
        attention=Attention(qkv_bias=True, output_bias=False, window=qwen_window),
        feed_forward=Mlp(bias=False),
    ),
    Decoder(
        model_type="qwen3",
        differs={**QWEN_DEFAULTS, "head_dim": 128},
        attention=Attention(qk_norm=per_head_norm, window=qwen_window),
        feed_forward=Mlp(bias=False),
    ),
    Decoder(
        model_type="glm",
        differs=_GLM_DEFAULTS,
        attention=Attention(output_bias=False, rotary=PARTIAL_INTERLEAVED),
        feed_forward=Mlp(bias=False),
    ),
    Decoder(
        model_type="glm4",
        differs=_GLM_DEFAULTS,
        attention=Attention(output_bias=False, rotary=PARTIAL_INTERLEAVED),
        feed_forward=Mlp(bias=False),
        placement=Placement.SANDWICH,
    ),
    Decoder(
        model_type="phi3",
        differs={
            "pad_token_id": 32000,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 1.0,
            "sliding_window": None,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
        },
        attention=Attention(
            qkv_bias=False,
            output_bias=False,
            window=same_window,
            rotary=RotaryForm(partial=True, renamed=(("su", "longrope"), ("yarn", "longrope"))),
        ),
        feed_forward=Mlp(bias=False),
        dropout=dropouts("attention_dropout", "resid_pdrop"),  # embd_pdrop is never applied
    ),
    Decoder(
        model_type="olmo2",
        differs={"pad_token_id": 1, "rms_norm_eps": 1e-5},
        attention=Attention(qk_norm=olmo_qk_norm),
        feed_forward=Mlp(bias=False),
        placement=Placement.BRANCH,
    ),
    Decoder(
        model_type="granite",
        differs={
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
        },
        attention=Attention(scale=lambda config: config.number("attention_multiplier")),
        embedding_scale=lambda config: config.number("embedding_multiplier"),
        logit_divisor=lambda config: config.number("logits_scaling"),
        residual_multiplier=lambda config: config.number("residual_multiplier"),
    ),
    Decoder(
        model_type="stablelm",
        differs={
            "max_position_embeddings": 4096,
            "num_key_value_heads": 32,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "use_qkv_bias": False,
            "qk_layernorm": False,
            "use_parallel_residual": False,
            "hidden_dropout": 0.0,
        },
        norm=layer_norm("layer_norm_eps"),
        attention=Attention(
            qkv_bias="use_qkv_bias",
            output_bias=False,
            qk_norm=_stablelm_qk_norm,
            rotary=PARTIAL,
            own_head_dim=False,
        ),
        feed_forward=Mlp(bias=False),
        residual=_stablelm_residual,
        dropout=dropouts("attention_dropout", "hidden_dropout"),
    ),
    Decoder(
        model_type="olmo",
        differs={"pad_token_id": 1},
        norm=lambda _: NormSpec(kind="layer", eps=1e-5, affine=False, bias=False),
        attention=Attention(own_head_dim=False),
        feed_forward=Mlp(bias=False),
        refuse={"clip_qkv": (None,)},
    ),
    Decoder(
        model_type="phi",
        differs={
            "hidden_act": "gelu_new",
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "qk_layernorm": False,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
        },
        norm=layer_norm("layer_norm_eps"),
        attention=Attention(
            qkv_bias=True,
            output_bias=True,
            qk_norm=_phi_qk_norm,
            rotary=PARTIAL,
            own_head_dim=False,
        ),
        feed_forward=Mlp(gated=False, bias=True),
        residual=lambda _: Residual.PARALLEL_ONE_NORM,
        head_bias=True,
        dropout=dropouts("attention_dropout", "resid_pdrop", "embd_pdrop"),
    ),
    Decoder(
        model_type="starcoder2",
        differs={
            "max_position_embeddings": 4096,
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5,
            "sliding_window": None,
            "use_bias": True,
            "residual_dropout": 0.0,
            "embedding_dropout": 0.0,
            "tie_word_embeddings": True,
        },
        norm=layer_norm("norm_epsilon"),
        attention=Attention(qkv_bias="use_bias", output_bias="use_bias", window=same_window),
        feed_forward=Mlp(gated=False, bias="use_bias"),
        dropout=dropouts("attention_dropout", "residual_dropout", "embedding_dropout"),
    ),
    Decoder(
        model_type="ernie4_5",
        differs={
            "pad_token_id": 0,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "use_bias": False,
            "tie_word_embeddings": True,
        },
        attention=Attention(qkv_bias="use_bias", output_bias="use_bias", rotary=INTERLEAVED),
        feed_forward=Mlp(bias="use_bias"),
        dropout=lambda _: DropoutSpec(),
    ),
    Decoder(
        model_type="hunyuan_v1_dense",
        differs={"pad_token_id": 0, "rms_norm_eps": 1e-5},
        attention=Attention(qk_norm=_hunyuan_qk_norm, rotary=RotaryForm(alpha=True)),
        feed_forward=Mlp(bias=False),
    ),
    Decoder(
        model_type="arcee",
        differs={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "relu2"},
        feed_forward=Mlp(gated=False),
    ),
    Decoder(
        model_type="nemotron",
        differs={
            "max_position_embeddings": 4096,
            "norm_eps": 1e-5,
            "hidden_act": "relu2",
            "partial_rotary_factor": 0.5,
        },
        norm=layer_norm("norm_eps", unit_offset=True),
        attention=Attention(rotary=PARTIAL),
        feed_forward=Mlp(gated=False),
    ),
    Decoder(
        model_type="seed_oss",
        differs={
            "pad_token_id": 1,
            "max_position_embeddings": 524288,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "attention_out_bias": False,
            "attention_dropout": 0.1,
            "residual_dropout": 0.1,
        },
        attention=Attention(output_bias="attention_out_bias"),
        dropout=dropouts("attention_dropout", "residual_dropout"),
    ),
    Decoder(
        model_type="internlm3",
        differs={
            "pad_token_id": 2,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
        },
        refuse={
            "qkv_bias": (False,),
            "bias": (False,),
        },  # as older files name what biases there are
    ),
)
