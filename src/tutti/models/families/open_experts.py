"""Types with experts that combine parts of others: dots.llm1 and OLMoE."""

from __future__ import annotations

from tutti.models.config import Config
from tutti.models.families.decoder import Attention, Decoder, typed_window
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
from tutti.models.parts import MoeSpec


def _dots1_slides(config: Config, layer: int) -> bool:
    return layer >= config.integer("max_window_layers", minimum=0)


def _olmoe(config: Config) -> MoeSpec:
    return plain_moe(config, config.integer("intermediate_size"))


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
)
