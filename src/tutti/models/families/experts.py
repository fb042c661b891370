"""Types with experts: Mixtral, Qwen 2/3 MoE, GLM-4.5, Ernie 4.5 MoE, gpt-oss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tutti.models.config import Config
from tutti.models.families.decoder import (
    ACTIVATIONS,
    Attention,
    Decoder,
    FeedForwardForm,
    Mlp,
    is_sliding,
    same_window,
    typed_window,
)
from tutti.models.families.llama_like import INTERLEAVED, PARTIAL, QWEN_DEFAULTS, per_head_norm
from tutti.models.families.registry import register
from tutti.models.parts import Activation, DropoutSpec, MlpSpec, MoeSpec, QkNormSpec, RouterSpec
from tutti.models.rotary import rope_section

DENSE = Mlp(bias=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparse:
    """Experts in the layers that `sparse` picks, a dense layer in the others."""

    moe: Callable[[Config], MoeSpec]
    dense: FeedForwardForm = DENSE
    sparse: Callable[[Config, int], bool] = lambda _config, _layer: True

    def read(self, config: Config, layer: int) -> MlpSpec | MoeSpec:
        """Return the feed-forward layer of one layer."""
        if self.sparse(config, layer):
            return self._averaged(config, self.moe(config))
        return self.dense.read(config, layer)

    def _averaged(self, config: Config, moe: MoeSpec) -> MoeSpec:
        """Return experts whose coefficient is as strong as transformers' is, where it has one."""
        if "router_aux_loss_coef" not in config.defaults:
            return moe
        layers = sum(self.sparse(config, layer) for layer in range(config.num_layers))
        share = moe.experts_per_token / layers
        return replace(moe, router=replace(moe.router, balance_share=share))


BALANCE: dict[str, object] = {"router_aux_loss_coef": 0.001, "output_router_logits": False}


def _mixtral(config: Config) -> MoeSpec:
    return MoeSpec(
        experts=config.integer("num_local_experts", "num_experts"),
        experts_per_token=config.integer("num_experts_per_tok"),
        hidden=config.integer("intermediate_size"),
        activation=config.choice("hidden_act", ACTIVATIONS),
        router=RouterSpec(
            normalize=True,
            jitter=config.probability("router_jitter_noise"),
            balance_loss=config.number("router_aux_loss_coef", zero=True),
            balance_loss_on=config.flag("output_router_logits"),
        ),
    )


# --- Qwen ------------------------------------------------------------------------------------


def _qwen_sparse(config: Config, layer: int) -> bool:
    if layer in config.layer_numbers("mlp_only_layers"):
        return False
    step = config.integer("decoder_sparse_step")
    experts = config.integer("num_experts", "num_local_experts", minimum=0)
    return experts > 0 and (layer + 1) % step == 0


def _qwen2_moe(config: Config) -> MoeSpec:
    shared = config.integer("shared_expert_intermediate_size")
    return replace(_qwen3_moe(config), shared_hidden=shared, shared_gate=True)


def _qwen3_moe(config: Config) -> MoeSpec:
    return plain_moe(config, config.integer("moe_intermediate_size"))


def plain_moe(config: Config, width: int) -> MoeSpec:
    """Return experts of a width behind a router by softmax, with a balancing loss and no more."""
    return MoeSpec(
        experts=config.integer("num_experts", "num_local_experts"),
        experts_per_token=config.integer("num_experts_per_tok"),
        hidden=width,
        activation=config.choice("hidden_act", ACTIVATIONS),
        router=RouterSpec(
            normalize=config.flag("norm_topk_prob"),
            balance_loss=config.number("router_aux_loss_coef", zero=True),
            balance_loss_on=config.flag("output_router_logits"),
        ),
    )


def _qwen2_moe_slides(config: Config, layer: int) -> bool:
    return layer % 2 == 0 and layer < config.integer("max_window_layers", minimum=0)


def _qwen2_moe_window(config: Config, layer: int) -> int | None:
    if not config.flag("use_sliding_window"):
        return None
    return typed_window(_qwen2_moe_slides)(config, layer)


def _qwen3_moe_window(config: Config, layer: int) -> int | None:
    return same_window(config, layer) if config.flag("use_sliding_window") else None


_QWEN_MOE: dict[str, object] = {
    **QWEN_DEFAULTS,
    **BALANCE,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": False,
}

# --- DeepSeek's router, also GLM-4.5's -------------------------------------------------------


def sigmoid_router(config: Config) -> RouterSpec:
    """Return sigmoid scores, a correction that steers the choice, groups by their two best."""
    return RouterSpec(
        scores="sigmoid",
        correction="buffer",
        groups=config.maybe_integer("n_group") or 1,
        top_groups=config.maybe_integer("topk_group") or 1,
        group_score="top2",
        normalize=config.flag("norm_topk_prob"),
        scale=config.number("routed_scaling_factor"),
    )


def deepseek_moe(router: Callable[[Config], RouterSpec]) -> Callable[[Config], MoeSpec]:
    """Return a reader of routed and shared experts under DeepSeek's names."""

    def read(config: Config) -> MoeSpec:
        hidden = config.integer("moe_intermediate_size")
        shared = config.maybe_integer("n_shared_experts", minimum=0) or 0
        return MoeSpec(
            experts=config.integer("n_routed_experts", "num_local_experts", "num_experts"),
            experts_per_token=config.integer("num_experts_per_tok"),
            hidden=hidden,
            activation=config.choice("hidden_act", ACTIVATIONS),
            router=router(config),
            shared_hidden=hidden * shared,
            shared_bias=config.flag("mlp_bias"),
        )

    return read


def dense_first(config: Config, layer: int) -> bool:
    """Tell whether a layer comes after the first, dense ones."""
    return layer >= config.integer("first_k_dense_replace", minimum=0)


def _glm_qk_norm(config: Config) -> QkNormSpec | None:
    return per_head_norm(config) if config.flag("use_qk_norm") else None


# --- Ernie and gpt-oss -----------------------------------------------------------------------


def _ernie_sparse(config: Config, layer: int) -> bool:
    start = config.integer("moe_layer_start_index", minimum=0)
    end = config.integer("moe_layer_end_index", minimum=-1)
    interval = config.integer("moe_layer_interval")
    return (layer + 1) % interval == 0 and start <= layer <= (end if end >= 0 else layer)


def _ernie_moe(config: Config) -> MoeSpec:
    hidden = config.integer("moe_intermediate_size")
    return MoeSpec(
        experts=config.integer("moe_num_experts", "num_experts"),
        experts_per_token=config.integer("moe_k", "num_experts_per_tok"),
        hidden=hidden,
        activation=config.choice("hidden_act", ACTIVATIONS),
        router=RouterSpec(
            correction="parameter",
            normalize=True,
            normalize_min=config.number("moe_norm_min", zero=True),
            balance_loss=config.number("router_aux_loss_coef", zero=True),
            balance_loss_on=config.flag("output_router_logits"),
        ),
        shared_hidden=hidden * config.integer("moe_num_shared_experts", minimum=0),
        shared_bias=config.flag("use_bias"),
    )


def _gpt_oss_moe(config: Config) -> MoeSpec:
    return MoeSpec(
        experts=config.integer("num_local_experts", "num_experts"),
        experts_per_token=config.integer("num_experts_per_tok"),
        hidden=config.integer("intermediate_size"),
        activation=Activation.CLAMPED_SWIGLU,
        activation_alpha=config.number("swiglu_alpha"),
        activation_limit=config.number("swiglu_limit"),
        bias=True,
        router=RouterSpec(
            scores="topk_softmax",
            bias=True,
            balance_loss=config.number("router_aux_loss_coef", zero=True),
            balance_loss_on=config.flag("output_router_logits"),
        ),
    )


def _even_layers(config: Config, layer: int) -> bool:
    del config
    return layer % 2 == 0


def _gpt_oss_rotary(config: Config, layer: int) -> Config:
    """Return the rotary settings; without any, YaRN by 32 is meant."""
    del layer
    section = rope_section(config)
    if section.values:
        return section
    yarn = {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
    return Config(values=yarn, place=section.place)


def _gpt_oss_window(config: Config, layer: int) -> int | None:
    slides = is_sliding(config, layer, _even_layers)
    return config.maybe_integer("sliding_window") if slides else None


register(
    Decoder(
        model_type="mixtral",
        differs={
            **BALANCE,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "sliding_window": None,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "router_jitter_noise": 0.0,
        },
        attention=Attention(qkv_bias=False, output_bias=False, window=same_window),
        feed_forward=Sparse(moe=_mixtral),
    ),
    Decoder(
        model_type="qwen2_moe",
        differs={
            **_QWEN_MOE,
            "num_key_value_heads": 16,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "qkv_bias": True,
        },
        attention=Attention(qkv_bias="qkv_bias", output_bias=False, window=_qwen2_moe_window),
        feed_forward=Sparse(moe=_qwen2_moe, sparse=_qwen_sparse),
    ),
    Decoder(
        model_type="qwen3_moe",
        differs={
            **_QWEN_MOE,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
        },
        attention=Attention(qk_norm=per_head_norm, window=_qwen3_moe_window),
        feed_forward=Sparse(moe=_qwen3_moe, sparse=_qwen_sparse),
    ),
    Decoder(
        model_type="glm4_moe",
        differs={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "use_qk_norm": False,
            "num_nextn_predict_layers": 1,
        },
        attention=Attention(output_bias=False, rotary=PARTIAL, qk_norm=_glm_qk_norm),
        feed_forward=Sparse(moe=deepseek_moe(sigmoid_router), sparse=dense_first),
        prediction_heads=("num_nextn_predict_layers", "num_mtp_layers"),
        refuse={"mlp_bias": (False,)},
    ),
    Decoder(
        model_type="ernie4_5_moe",
        differs={
            "pad_token_id": 0,
            **BALANCE,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
            "use_bias": False,
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "moe_norm_min": 1e-12,
        },
        attention=Attention(qkv_bias="use_bias", output_bias="use_bias", rotary=INTERLEAVED),
        feed_forward=Sparse(moe=_ernie_moe, dense=Mlp(bias="use_bias"), sparse=_ernie_sparse),
        head_bias="use_bias",
        dropout=lambda _: DropoutSpec(),
    ),
    Decoder(
        model_type="gpt_oss",
        differs={
            **BALANCE,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "attention_bias": True,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        attention=Attention(window=_gpt_oss_window, rotary_section=_gpt_oss_rotary, sinks=True),
        feed_forward=Sparse(moe=_gpt_oss_moe),
        refuse={"hidden_act": ("silu",)},
    ),
)
