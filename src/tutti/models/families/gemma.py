"""Gemma 1, 2 and 3: scaled embeddings, norms around one, soft caps, alternating windows."""

from __future__ import annotations

import math

from tutti.models.config import Config
from tutti.models.families.decoder import (
    Attention,
    Decoder,
    Mlp,
    gemma_norm,
    is_sliding,
    typed_window,
)
from tutti.models.families.registry import register
from tutti.models.parts import MlpSpec, Placement, QkNormSpec
from tutti.models.rotary import rope_section


def _embedding_scale(config: Config) -> float:
    return math.sqrt(config.hidden)


def _query_scale(config: Config) -> float:
    return 1 / math.sqrt(config.number("query_pre_attn_scalar"))


class _Gemma1Mlp:
    """Gemma 1's files say "gelu" and mean its tanh approximation."""

    def read(self, config: Config, layer: int) -> MlpSpec:
        """Return the feed-forward layer."""
        if config.raw("hidden_act") == "gelu":
            values = {**config.values, "hidden_act": "gelu_pytorch_tanh"}
            config = Config(values=values, place=config.place, defaults=config.defaults)
        return Mlp(bias=False).read(config, layer)


def _every_other(config: Config, layer: int) -> bool:
    del config
    return layer % 2 == 0


def _all_but_each_sixth(config: Config, layer: int) -> bool:
    return (layer + 1) % config.integer("sliding_window_pattern") != 0


def _qk_norm(config: Config) -> QkNormSpec:
    return QkNormSpec(norm=gemma_norm(config))


def _gemma3_rotary(config: Config, layer: int) -> Config:
    """Sliding and full layers have rotary settings of their own."""
    slides = is_sliding(config, layer, _all_but_each_sixth)
    kind = "sliding_attention" if slides else "full_attention"
    key = "rope_local_base_freq" if slides else "rope_theta"
    nested = config.section("rope_parameters")
    section = nested.section(kind) if nested is not None else None
    values = dict(section.values) if section is not None else {}
    if not slides:
        values.update(rope.values if (rope := config.section("rope_scaling")) else {})
    values.setdefault("rope_theta", config.number(key))
    place = section.place if section is not None else rope_section(config).place
    return Config(values=values, place=place)


_GEMMA: dict[str, object] = {
    "pad_token_id": 0,
    "max_position_embeddings": 8192,
    "head_dim": 256,
    "tie_word_embeddings": True,
}
_GEMMA2: dict[str, object] = {
    **_GEMMA,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

register(
    Decoder(
        model_type="gemma",
        differs={**_GEMMA, "num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh"},
        norm=gemma_norm,
        feed_forward=_Gemma1Mlp(),
        embedding_scale=_embedding_scale,
    ),
    Decoder(
        model_type="gemma2",
        differs={
            **_GEMMA2,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        norm=gemma_norm,
        attention=Attention(
            scale=_query_scale,
            window=typed_window(_every_other),
            soft_cap="attn_logit_softcapping",
        ),
        feed_forward=Mlp(activation="hidden_activation", bias=False),
        placement=Placement.SANDWICH,
        embedding_scale=_embedding_scale,
        logit_soft_cap="final_logit_softcapping",
    ),
    Decoder(
        model_type="gemma3_text",
        differs={
            **_GEMMA2,
            "max_position_embeddings": 131072,
            "sliding_window_pattern": 6,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
        },
        norm=gemma_norm,
        attention=Attention(
            qk_norm=_qk_norm,
            scale=_query_scale,
            window=typed_window(_all_but_each_sixth),
            rotary_section=_gemma3_rotary,
            soft_cap="attn_logit_softcapping",
        ),
        feed_forward=Mlp(activation="hidden_activation", bias=False),
        placement=Placement.SANDWICH,
        embedding_scale=_embedding_scale,
        logit_soft_cap="final_logit_softcapping",
    ),
)
