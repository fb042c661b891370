"""Types with experts: most keep one tensor per expert, gpt-oss all of them in one."""

from __future__ import annotations

from tutti.huggingface.maps.llama_like import LLAMA
from tutti.huggingface.maps.registry import register
from tutti.huggingface.weight_map import Each, ExpertStack, Same, WeightMap

# DeepSeek's names, also GLM-4.5's
ROUTED = LLAMA.but(
    block={
        "moe.router": "mlp.gate",
        "moe.router.correction": "mlp.gate.e_score_correction_bias",
        "moe.experts.gate": Each("mlp.experts.{index}.gate_proj"),
        "moe.experts.up": Each("mlp.experts.{index}.up_proj"),
        "moe.experts.down": Each("mlp.experts.{index}.down_proj"),
        "moe.shared.gate": "mlp.shared_experts.gate_proj",
        "moe.shared.up": "mlp.shared_experts.up_proj",
        "moe.shared.down": "mlp.shared_experts.down_proj",
    }
)

MIXTRAL: WeightMap = LLAMA.but(
    block={
        "moe.router": "block_sparse_moe.gate",
        "moe.experts.gate": Each("block_sparse_moe.experts.{index}.w1"),
        "moe.experts.up": Each("block_sparse_moe.experts.{index}.w3"),
        "moe.experts.down": Each("block_sparse_moe.experts.{index}.w2"),
    }
)

register(ROUTED, "qwen3_moe", "glm4_moe", "dots1", "olmoe")
register(MIXTRAL, "mixtral", "phimoe")
register(
    ROUTED.but(
        block={
            "moe.shared.gate": "mlp.shared_expert.gate_proj",
            "moe.shared.up": "mlp.shared_expert.up_proj",
            "moe.shared.down": "mlp.shared_expert.down_proj",
            "moe.shared_gate": "mlp.shared_expert_gate",
        }
    ),
    "qwen2_moe",
)
register(
    ROUTED.but(
        block={
            "moe.router.correction": Same("mlp.moe_statics.e_score_correction_bias", leading=1),
        }
    ),
    "ernie4_5_moe",
)
register(
    LLAMA.but(
        block={
            "attention.sinks": "self_attn.sinks",
            "moe.router": "mlp.router",
            "moe.experts.gate": ExpertStack("mlp.experts.gate_up_proj", part=0, parts=2),
            "moe.experts.up": ExpertStack("mlp.experts.gate_up_proj", part=1, parts=2),
            "moe.experts.down": ExpertStack("mlp.experts.down_proj"),
        }
    ),
    "gpt_oss",
)
