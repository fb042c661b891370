"""Small configs of every model type, several where a type has options that change its shape."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest

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

# name: config; the first of each type has the fewest keys
TINY: dict[str, dict[str, object]] = {
    "llama": {"model_type": "llama", **BASE},
    "llama/gqa": {"model_type": "llama", **GQA, "tie_word_embeddings": True, "head_dim": 16},
    "llama/bias": {"model_type": "llama", **BASE, "attention_bias": True, "mlp_bias": True},
    "llama/3.1": {"model_type": "llama", **GQA, "rope_theta": 5e5, "rope_scaling": LLAMA3},
    "llama/linear": {
        "model_type": "llama",
        **GQA,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "llama/dynamic": {
        "model_type": "llama",
        **GQA,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    },
    "llama/yarn": {"model_type": "llama", **GQA, "rope_scaling": YARN},
    "mistral": {"model_type": "mistral", **BASE},
    "mistral/window": {"model_type": "mistral", **GQA, "sliding_window": None, "head_dim": 16},
    "qwen2": {"model_type": "qwen2", **BASE, "num_key_value_heads": 8},
    "qwen2/window": {
        "model_type": "qwen2",
        **GQA,
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 2,
    },
    "qwen3": {"model_type": "qwen3", **BASE, "num_key_value_heads": 4},
    "qwen2_moe": {"model_type": "qwen2_moe", **BASE, "num_key_value_heads": 8},
    "qwen2_moe/sparse": {
        "model_type": "qwen2_moe",
        **GQA,
        **EXPERTS,
        "shared_expert_intermediate_size": 48,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "qkv_bias": False,
        "use_sliding_window": True,
        "sliding_window": 16,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", **BASE},
    "qwen3_moe/sparse": {
        "model_type": "qwen3_moe",
        **GQA,
        **EXPERTS,
        "mlp_only_layers": [0],
        "head_dim": 16,
        "norm_topk_prob": True,
        "use_sliding_window": True,
        "sliding_window": 16,
    },
    "mixtral": {"model_type": "mixtral", **BASE},
    "mixtral/4": {"model_type": "mixtral", **GQA, "num_local_experts": 4, "sliding_window": 32},
    "deepseek_v2": {"model_type": "deepseek_v2", **BASE, "num_experts_per_tok": 2},
    "deepseek_v2/grouped": {
        "model_type": "deepseek_v2",
        **DEEPSEEK,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 16.0,
        "rope_scaling": YARN,
    },
    "deepseek_v2/lite": {"model_type": "deepseek_v2", **DEEPSEEK, "q_lora_rank": None},
    "deepseek_v2/bias": {
        "model_type": "deepseek_v2",
        **DEEPSEEK,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "deepseek_v3": {"model_type": "deepseek_v3", **BASE, "num_key_value_heads": 8},
    "deepseek_v3/small": {
        "model_type": "deepseek_v3",
        **DEEPSEEK,
        "n_group": 2,
        "topk_group": 1,
        "rope_scaling": YARN,
        "rope_interleave": False,
    },
    "glm": {"model_type": "glm", **BASE},
    "glm4": {"model_type": "glm4", **BASE},
    "glm4/bias": {"model_type": "glm4", **GQA, "attention_bias": False, "head_dim": 16},
    "glm4_moe": {"model_type": "glm4_moe", **BASE},
    "glm4_moe/norm": {
        "model_type": "glm4_moe",
        **GQA,
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 2,
    },
    "gemma": {"model_type": "gemma", **BASE, "num_key_value_heads": 8},
    "gemma/1": {"model_type": "gemma", **BASE, "num_key_value_heads": 1, "hidden_act": "gelu"},
    "gemma2": {"model_type": "gemma2", **BASE},
    "gemma2/types": {
        "model_type": "gemma2",
        **GQA,
        "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
        "attention_bias": True,
    },
    "gemma3_text": {"model_type": "gemma3_text", **BASE},
    "gemma3_text/pattern": {
        "model_type": "gemma3_text",
        **GQA,
        "sliding_window_pattern": 2,
        "sliding_window": 16,
        "rope_theta": 1e5,
        "rope_local_base_freq": 5e3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "phi3": {"model_type": "phi3", **BASE},
    "phi3/long": {
        "model_type": "phi3",
        **GQA,
        "original_max_position_embeddings": 64,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
        },
        "sliding_window": 32,
        "resid_pdrop": 0.1,
    },
    "gpt_neox": {"model_type": "gpt_neox", **BASE},
    "gpt_neox/serial": {
        "model_type": "gpt_neox",
        **BASE,
        "use_parallel_residual": False,
        "attention_bias": False,
        "rotary_pct": 1.0,
        "rotary_emb_base": 5e3,
        "tie_word_embeddings": True,
    },
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 8, "vocab_size": 160},
    "gpt2/inner": {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 8,
        "vocab_size": 160,
        "n_inner": 96,
        "n_positions": 32,
        "tie_word_embeddings": False,
        "scale_attn_by_inverse_layer_idx": True,
    },
    "falcon": {"model_type": "falcon", **SHORT},
    "falcon/new": {
        "model_type": "falcon",
        **SHORT,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "ffn_hidden_size": 96,
        "bias": True,
    },
    "falcon/one-norm": {
        "model_type": "falcon",
        **SHORT,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1,
        "tie_word_embeddings": False,
    },
    "falcon/alibi": {
        "model_type": "falcon",
        **SHORT,
        "alibi": True,
        "multi_query": False,
        "parallel_attn": False,
        "bias": True,
    },
    "opt": {"model_type": "opt", **SHORT, "ffn_dim": 96},
    "opt/350m": {
        "model_type": "opt",
        **SHORT,
        "ffn_dim": 96,
        "word_embed_proj_dim": 32,
        "do_layer_norm_before": False,
    },
    "opt/plain": {
        "model_type": "opt",
        **SHORT,
        "ffn_dim": 96,
        "enable_bias": False,
        "layer_norm_elementwise_affine": False,
        "tie_word_embeddings": False,
    },
    "bloom": {
        "model_type": "bloom",
        "hidden_size": 64,
        "n_layer": 3,
        "n_head": 8,
        "vocab_size": 160,
    },
    "olmo2": {"model_type": "olmo2", **BASE},
    "olmo2/gqa": {"model_type": "olmo2", **GQA, "attention_bias": True},
    "granite": {"model_type": "granite", **BASE},
    "granite/scaled": {
        "model_type": "granite",
        **GQA,
        "embedding_multiplier": 12.0,
        "logits_scaling": 16.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.0078125,
        "mlp_bias": True,
    },
    "stablelm": {"model_type": "stablelm", **BASE, "num_key_value_heads": 8},
    "stablelm/12b": {
        "model_type": "stablelm",
        **GQA,
        "qk_layernorm": True,
        "use_parallel_residual": True,
        "use_qkv_bias": True,
    },
    "olmo": {"model_type": "olmo", **GQA},
    "phi": {"model_type": "phi", **BASE},
    "phi/norms": {
        "model_type": "phi",
        **GQA,
        "qk_layernorm": True,
        "partial_rotary_factor": 0.25,
        "hidden_act": "gelu",
        "tie_word_embeddings": True,
    },
    "starcoder2": {"model_type": "starcoder2", **BASE},
    "starcoder2/plain": {"model_type": "starcoder2", **GQA, "use_bias": False},
    "minicpm3": {"model_type": "minicpm3", **BASE, "num_key_value_heads": 8},
    "minicpm3/small": {
        "model_type": "minicpm3",
        **LATENT,
        "attention_bias": True,
        "scale_depth": None,
        "dim_model_base": None,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 2.0],
            "long_factor": [1.5, 2.5],
            "original_max_position_embeddings": 64,
        },
    },
    "ernie4_5": {"model_type": "ernie4_5", **BASE},
    "ernie4_5/bias": {"model_type": "ernie4_5", **GQA, "use_bias": True, "head_dim": None},
    "ernie4_5_moe": {"model_type": "ernie4_5_moe", **BASE},
    "ernie4_5_moe/sparse": {
        "model_type": "ernie4_5_moe",
        **GQA,
        "moe_intermediate_size": 32,
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_num_shared_experts": 0,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
        "use_bias": True,
    },
    "hunyuan_v1_dense": {"model_type": "hunyuan_v1_dense", **BASE, "head_dim": 8},
    "hunyuan_v1_dense/alpha": {
        "model_type": "hunyuan_v1_dense",
        **GQA,
        "head_dim": 16,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    },
    "gpt_oss": {"model_type": "gpt_oss", **BASE},
    "gpt_oss/plain": {
        "model_type": "gpt_oss",
        **GQA,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attention_bias": False,
        "rope_scaling": {"rope_type": "default"},
    },
    "arcee": {"model_type": "arcee", **BASE},
    "arcee/bias": {"model_type": "arcee", **GQA, "mlp_bias": True, "head_dim": 16},
    "nemotron": {"model_type": "nemotron", **BASE, "num_key_value_heads": 8},
    "nemotron/bias": {
        "model_type": "nemotron",
        **GQA,
        "head_dim": 16,
        "attention_bias": True,
        "mlp_bias": True,
        "partial_rotary_factor": 0.25,
    },
    "seed_oss": {"model_type": "seed_oss", **BASE},
    "seed_oss/bias": {
        "model_type": "seed_oss",
        **GQA,
        "head_dim": 16,
        "attention_out_bias": True,
        "mlp_bias": True,
    },
    "smollm3": {"model_type": "smollm3", **BASE},
    "smollm3/window": {
        "model_type": "smollm3",
        **GQA,
        "no_rope_layers": [0, 1, 0, 1],
        "use_sliding_window": True,
        "sliding_window": 16,
        "tie_word_embeddings": False,
    },
    "exaone4": {"model_type": "exaone4", **BASE, "num_key_value_heads": 8},
    "exaone4/full": {
        "model_type": "exaone4",
        **GQA,
        "sliding_window": None,
        "layer_types": ["full_attention"] * 4,
        "rope_scaling": LLAMA3,
        "tie_word_embeddings": True,
    },
    "cohere2": {"model_type": "cohere2", **BASE},
    "cohere2/types": {
        "model_type": "cohere2",
        **GQA,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "attention_bias": True,
        "logit_scale": 0.25,
    },
    "olmo3": {"model_type": "olmo3", **BASE},
    "olmo3/yarn": {
        "model_type": "olmo3",
        **GQA,
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
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
}

# The first config of a type leaves out its counts of experts, which makes it large; shrink them.
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
)


def tiny_config(name: str) -> dict[str, object]:
    """Return a tiny config whose experts are few and small, too."""
    values = copy.deepcopy(TINY[name])
    return {**SMALLER, **values} if name in EXPERT_TYPES else values


# Types made of parts that others have: their heavier comparisons run with the slow tests.
COMBINED = (
    "arcee", "cohere2", "dots1", "exaone4", "nemotron", "olmo3", "olmoe", "seed_oss", "smollm3",
)  # fmt: skip


def with_slow(names: Iterable[str], *, first: bool = False) -> list[Any]:
    """Return names as parameters, those of combined types slow; `first`: but not their first."""
    return [
        pytest.param(name, marks=pytest.mark.slow)
        if name.split("/")[0] in COMBINED and not (first and name in COMBINED)
        else name
        for name in names
    ]
