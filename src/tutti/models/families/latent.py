"""Types with multi-latent attention: DeepSeek-V2, DeepSeek-V3, MiniCPM3."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tutti.models.config import Config
from tutti.models.families.decoder import Decoder, Mlp, setting
from tutti.models.families.experts import Sparse, deepseek_moe, dense_first, sigmoid_router
from tutti.models.families.registry import register
from tutti.models.parts import AttentionSpec, LatentSpec, RouterSpec
from tutti.models.rotary import RotaryForm, score_multiplier


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Queries, keys and values through low-rank latents; part of each head is rotated."""

    interleaved: bool | str = True

    def read(self, config: Config, layer: int) -> AttentionSpec:
        """Return the attention of one layer."""
        del layer
        nope = config.integer("qk_nope_head_dim", minimum=0)
        rope = config.integer("qk_rope_head_dim")
        kv_heads = config.maybe_integer("num_key_value_heads") or config.heads
        if kv_heads != config.heads:
            raise config.wrong(
                "num_key_value_heads", kv_heads, f"{config.heads}, as latent attention has heads"
            )
        bias = config.flag("attention_bias")
        multiplier = score_multiplier(config)
        form = RotaryForm(interleaved=setting(config, self.interleaved))
        return AttentionSpec(
            heads=config.heads,
            kv_heads=config.heads,
            head_dim=nope + rope,
            output_bias=bias,
            rotary=form.read(config, rope),
            scale=None if multiplier == 1 else multiplier / math.sqrt(nope + rope),
            latent=LatentSpec(
                query_rank=config.maybe_integer("q_lora_rank"),
                kv_rank=config.integer("kv_lora_rank"),
                nope_dim=nope,
                rope_dim=rope,
                value_dim=config.maybe_integer("v_head_dim") or config.even_head_dim,
                bias=bias,
            ),
        )


_GROUPED = {"greedy": False, "group_limited_greedy": True}


def _deepseek_v2_router(config: Config) -> RouterSpec:
    grouped = config.choice("topk_method", _GROUPED)
    return RouterSpec(
        groups=config.integer("n_group") if grouped else 1,
        top_groups=config.integer("topk_group") if grouped else 1,
        scale=config.number("routed_scaling_factor"),
        # published; transformers never adds it
        balance_loss=config.number("aux_loss_alpha", zero=True),
    )


def _depth_scale(config: Config) -> float:
    depth = config.maybe_number("scale_depth")
    return 1.0 if depth is None else depth / math.sqrt(config.num_layers)


def _width_ratio(config: Config) -> float:
    base = config.maybe_integer("dim_model_base")
    return 1.0 if base is None else config.hidden / base


register(
    Decoder(
        model_type="deepseek_v2",
        differs={
            "first_k_dense_replace": 0,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "n_group": None,
            "topk_group": None,
            "topk_method": "greedy",
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "routed_scaling_factor": 1.0,
            "moe_intermediate_size": 1407,
            "aux_loss_alpha": 0.0,
        },
        attention=LatentAttention(),
        feed_forward=Sparse(moe=deepseek_moe(_deepseek_v2_router), dense=Mlp(), sparse=dense_first),
        # transformers never normalises here, whatever norm_topk_prob says
        refuse={
            "norm_topk_prob": (False, None),
            "scoring_func": ("softmax",),
            "moe_layer_freq": (1,),
        },
    ),
    Decoder(
        model_type="deepseek_v3",
        differs={
            "max_position_embeddings": 4096,
            "num_key_value_heads": 128,
            "first_k_dense_replace": 3,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "n_group": 8,
            "topk_group": 4,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "routed_scaling_factor": 2.5,
            "moe_intermediate_size": 2048,
            "norm_topk_prob": True,
            "rope_interleave": True,
            "num_nextn_predict_layers": 1,
        },
        attention=LatentAttention(interleaved="rope_interleave"),
        feed_forward=Sparse(moe=deepseek_moe(sigmoid_router), sparse=dense_first),
        prediction_heads=("num_nextn_predict_layers", "num_mtp_layers"),
        refuse={
            "mlp_bias": (False,),
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "moe_layer_freq": (1,),
        },
    ),
    Decoder(
        model_type="minicpm3",
        differs={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 40,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "kv_lora_rank": 256,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": None,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 256,
        },
        attention=LatentAttention(interleaved=False),
        embedding_scale=lambda config: config.number("scale_emb"),
        residual_multiplier=_depth_scale,
        logit_divisor=_width_ratio,
    ),
)
