"""Llama's names, and the dense types that differ from them in a few."""

from __future__ import annotations

from tutti.huggingface.maps.registry import register
from tutti.huggingface.weight_map import Each, Rows, WeightMap

LLAMA = WeightMap(
    embedding={"token": "model.embed_tokens"},
    block={
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.o_proj",
        "attention.query_norm": "self_attn.q_norm",
        "attention.key_norm": "self_attn.k_norm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
    head={"norm": "model.norm", "logits": "lm_head"},
)

_GATE_UP = Rows("mlp.gate_up_proj", of=("mlp.gate", "mlp.up"))
_QKV = Rows("self_attn.qkv_proj", of=("attention.query", "attention.key", "attention.value"))

register(LLAMA, "llama", "mistral", "qwen2", "qwen3", "granite", "gemma", "ernie4_5")
register(LLAMA, "arcee", "cohere2", "internlm3", "nemotron", "olmo", "seed_oss", "smollm3")
register(
    LLAMA.but(
        block={
            "attention_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        }
    ),
    "gemma2",
    "gemma3_text",
    "olmo2",
    "olmo3",
    "exaone4",
)
register(LLAMA.but(block={"mlp.gate": _GATE_UP, "mlp.up": _GATE_UP}), "glm")
register(
    LLAMA.but(
        block={
            "mlp.gate": _GATE_UP,
            "mlp.up": _GATE_UP,
            "attention_post_norm": "post_self_attn_layernorm",
            "mlp_post_norm": "post_mlp_layernorm",
        }
    ),
    "glm4",
)
register(
    LLAMA.but(
        block={
            "mlp.gate": _GATE_UP,
            "mlp.up": _GATE_UP,
            "attention.query": _QKV,
            "attention.key": _QKV,
            "attention.value": _QKV,
        }
    ),
    "phi3",
)
register(LLAMA.but(block={"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}), "starcoder2")
register(
    LLAMA.but(
        block={
            "attention.query_norm": "self_attn.query_layernorm",
            "attention.key_norm": "self_attn.key_layernorm",
        }
    ),
    "hunyuan_v1_dense",
)
register(
    LLAMA.but(
        block={
            "attention.query_norm": Each("self_attn.q_layernorm.norms.{index}"),
            "attention.key_norm": Each("self_attn.k_layernorm.norms.{index}"),
        }
    ),
    "stablelm",
)
register(
    LLAMA.but(
        block={
            "attention.output": "self_attn.dense",
            "attention.query_norm": "self_attn.q_layernorm",
            "attention.key_norm": "self_attn.k_layernorm",
            "mlp.up": "mlp.fc1",
            "mlp.down": "mlp.fc2",
        },
        head={"norm": "model.final_layernorm"},
    ),
    "phi",
)
