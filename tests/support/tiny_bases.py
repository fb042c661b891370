"""What configurations of small models of several types have in common."""

from __future__ import annotations

BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 160,
}


GQA = {**BASE, "num_key_value_heads": 2, "max_position_embeddings": 128}


LATENT = {
    **BASE,
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "max_position_embeddings": 128,
}


EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3}


DEEPSEEK = {
    **LATENT,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}


SHORT = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "vocab_size": 160}


YARN = {"type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.7}


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SMALLER = {
    "num_experts": 6,
    "moe_num_experts": 6,
    "n_routed_experts": 6,
    "num_local_experts": 6,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 48,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
}
EXPERT_TYPES = (
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "ernie4_5_moe",
    "gpt_oss",
    "dots1",
    "olmoe",
    "phimoe",
)
