"""Small configs of the types of `models/families/open_experts.py`."""

from __future__ import annotations

from tests.support.tiny_bases import BASE, GQA

OPEN_EXPERTS: dict[str, dict[str, object]] = {
    "dots1": {
        "model_type": "dots1",
        **BASE,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
    },
    "dots1/sparse": {
        "model_type": "dots1",
        **GQA,
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "sliding_window": 16,
        "max_window_layers": 2,
    },
    "olmoe": {"model_type": "olmoe", **BASE},
    "olmoe/gqa": {
        "model_type": "olmoe",
        **GQA,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "phimoe": {"model_type": "phimoe", **BASE, "num_key_value_heads": 8},
    "phimoe/long": {
        "model_type": "phimoe",
        **GQA,
        "num_local_experts": 6,
        "attention_bias": True,
        "lm_head_bias": True,
        "router_jitter_noise": 0.2,
        "sliding_window": 16,
        "original_max_position_embeddings": 64,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 2.5, 3.0, 3.5],
            "short_mscale": 1.25,
            "long_mscale": 1.25,
            "original_max_position_embeddings": 64,
        },
    },
}
