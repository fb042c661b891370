"""Types with multi-latent attention: DeepSeek-V2 and V3, MiniCPM3."""

from __future__ import annotations

from tutti.huggingface.maps.experts import ROUTED
from tutti.huggingface.maps.registry import register

LATENT = ROUTED.but(
    block={
        "attention.query_down": "self_attn.q_a_proj",
        "attention.query_latent_norm": "self_attn.q_a_layernorm",
        "attention.query_up": "self_attn.q_b_proj",
        "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_latent_norm": "self_attn.kv_a_layernorm",
        "attention.kv_up": "self_attn.kv_b_proj",
    }
)

register(LATENT, "deepseek_v2", "deepseek_v3", "minicpm3")
