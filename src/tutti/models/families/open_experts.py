"""Types with experts that combine parts of others: dots.llm1, OLMoE and Phi-3.5-MoE."""

from __future__ import annotations

from tutti.models.config import Config
from tutti.models.families.decoder import (
    ACTIVATIONS,
    Attention,
    Decoder,
    layer_norm,
    same_window,
    typed_window,
)
from tutti.models.families.experts import (
    BALANCE,
    Sparse,
    deepseek_moe,
    dense_first,
    plain_moe,
    sigmoid_router,
)
from tutti.models.families.llama_like import olmo_qk_norm, per_head_norm
from tutti.models.families.registry import register
from tutti.models.parts import MoeSpec, RouterSpec
from tutti.models.rotary import rope_section


def _dots1_slides(config: Config, layer: int) -> bool:
    return layer >= config.integer("max_window_layers", minimum=0)


def _olmoe(config: Config) -> MoeSpec:
    return plain_moe(config, config.integer("intermediate_size"))


# --- Phi-3.5-MoE: SparseMixer without its draws, one factor of cosines and sines ---------------


def _phimoe(config: Config) -> MoeSpec:
    """Return experts of which each is weighed among those near it."""
    return MoeSpec(
        experts=config.integer("num_local_experts", "num_experts"),
        experts_per_token=config.integer("num_experts_per_tok"),
        hidden=config.integer("intermediate_size"),
        activation=config.choice("hidden_act", ACTIVATIONS),
        router=RouterSpec(
            scores="near_softmax",
            near=2 * config.probability("router_jitter_noise"),
            jitter=config.probability("input_jitter_noise"),
            balance_loss=config.number("router_aux_loss_coef", zero=True),
            balance_loss_on=config.flag("output_router_logits"),
        ),
    )


def _phimoe_rotary(config: Config, layer: int) -> Config:
    """Return the rotary settings with the factor that longrope has under two names here."""
    del layer
    section = rope_section(config)
    if "short_mscale" not in section.values and "long_mscale" not in section.values:
        return section
    factor = section.number("short_mscale")
    section.refuse_unless(
        "long_mscale",
        factor,
        why=f"'short_mscale' is {factor:g}, and tutti has one factor for short and long texts",
    )
    return Config(
        values={**section.values, "attention_factor": factor},
        place=section.place,
        defaults=section.defaults,
    )


register(
    Decoder(
        model_type="dots1",
        differs={
            "num_key_value_heads": 32,
            "moe_intermediate_size": 1408,
            "n_shared_experts": None,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "sliding_window": 4096,
            "max_window_layers": 62,
        },
        attention=Attention(qk_norm=per_head_norm, window=typed_window(_dots1_slides)),
        feed_forward=Sparse(moe=deepseek_moe(sigmoid_router), sparse=dense_first),
    ),
    Decoder(
        model_type="olmoe",
        differs={
            **BALANCE,
            "pad_token_id": 1,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "router_aux_loss_coef": 0.01,
            "norm_topk_prob": False,
        },
        attention=Attention(qk_norm=olmo_qk_norm),
        feed_forward=Sparse(moe=_olmoe),
        refuse={"clip_qkv": (None,)},
    ),
    Decoder(
        model_type="phimoe",
        differs={
            **BALANCE,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "sliding_window": None,
            "num_experts_per_tok": 2,
            "num_local_experts": 16,
            "router_jitter_noise": 0.01,
            "input_jitter_noise": 0.0,
            "lm_head_bias": False,
        },
        norm=layer_norm("rms_norm_eps"),
        attention=Attention(window=same_window, rotary_section=_phimoe_rotary),
        feed_forward=Sparse(moe=_phimoe),
        head_bias="lm_head_bias",
        refuse={"num_experts_per_tok": (2,)},  # transformers chooses two, whatever it says
    ),
)
