"""Small models of three kinds with random weights, and their losses with all gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.operators import Operators
from tutti.models import ModelSpec, read_config
from tutti.nn import ALONE, Batch, Model, ParallelContext
from tutti.nn.initialize import normal
from tutti.plan.plan import ContextKind

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 67,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama", **SIZES, "num_key_value_heads": 2, "attention_bias": True},
    "one-kv-head": {"model_type": "qwen3", **SIZES, "num_key_value_heads": 1, "head_dim": 8},
    "qk-norm": {"model_type": "olmo2", **SIZES, "num_key_value_heads": 1},
    "tied": {
        "model_type": "gemma2",
        **SIZES,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 5,
    },
    "alibi": {"model_type": "bloom", **SIZES, "n_layer": 2, "n_head": 4},
    "positions": {"model_type": "opt", **SIZES, "ffn_dim": 48, "word_embed_proj_dim": 16},
    "latent": {
        "model_type": "deepseek_v3",
        **SIZES,
        "num_key_value_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "moe_intermediate_size": 16,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "experts": {
        "model_type": "qwen2_moe",
        **SIZES,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.5,
        "output_router_logits": True,
    },
    "expert-bias": {
        "model_type": "gpt_oss",
        **SIZES,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
        "router_aux_loss_coef": 0.0,
    },
}
LENGTHS = (13, 9, 18)


def spec_of(kind: str, *, prediction_heads: int = 0) -> ModelSpec:
    spec = read_config(CONFIGS[kind], kind)
    return spec.with_prediction_heads(prediction_heads) if prediction_heads else spec


@torch.no_grad()
def fill(model: Model) -> Model:
    """Give every tensor numbers that depend on its name alone; none at a trivial value."""
    for logical in model.logical_tensors():
        parameter = logical.piece.parameter
        name = parameter.tied_to or logical.name
        numbers = normal(0, name, parameter, logical.slices) * 0.15
        if logical.name.endswith("norm.weight"):
            numbers = numbers + 1.0
        logical.view.copy_(numbers)
    return model


def make(
    spec: ModelSpec,
    *,
    parallel: ParallelContext = ALONE,
    units: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float64,
    context_kind: ContextKind = ContextKind.ALL_GATHER,
) -> Model:
    model = Model(
        spec,
        Operators("cpu"),
        parallel=parallel,
        units=units,
        dtype=dtype,
        context_kind=context_kind,
    )
    return fill(model)


def batch_of(spec: ModelSpec, lengths: Sequence[int] = LENGTHS) -> Batch:
    generator = torch.Generator().manual_seed(3)
    count = sum(LENGTHS)
    tokens = torch.randint(0, spec.vocab, (count,), generator=generator)
    targets = torch.randint(0, spec.vocab, (count,), generator=generator)
    targets[2] = -100
    own = sum(lengths)
    return Batch.of(spec, tokens[:own], lengths, targets_t=targets[:own])


def total_loss(out: Any) -> Tensor:
    """Return everything that is trained on."""
    loss: Tensor = out.loss
    if out.predictions_n is not None:
        loss = loss + 0.3 * out.predictions_n.sum()
    return loss if out.balance is None else loss + out.balance


def gradients_of(model: Model) -> dict[str, Tensor]:
    return {
        logical.name: logical.gradient.clone()
        for logical in model.logical_tensors()
        if logical.gradient is not None
    }


def whole_run(
    spec: ModelSpec, later: WeightGradients | None = None, lengths: Sequence[int] = LENGTHS
) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and all gradients of one process."""
    model = make(spec)
    loss = total_loss(model(None, batch_of(spec, lengths), later))
    loss.backward()
    if later is not None:
        later.run()
    return float(loss.detach()), gradients_of(model)


def zero_gradients(spec: ModelSpec) -> set[str]:
    """Return the tensors whose gradient is zero but for rounding.

    Without rotary positions a key's bias adds the same to all scores of a query, which softmax does
    not see; what both sides compute there is noise, to be held against the query bias's gradient.
    """
    return {
        f"{unit}.attention.key.bias"
        for unit in range(1, spec.num_layers + 1)
        if spec.block(unit).attention.rotary is None and spec.block(unit).attention.qkv_bias
    }
