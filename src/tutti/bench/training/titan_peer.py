"""torchtitan's own model, its blocks and its loss compiled, in the plain loop of the others."""

from __future__ import annotations

import gc
import importlib.util
import logging
from typing import Any

import torch

from tutti.accelerator import Accelerator, open_accelerator
from tutti.bench.training.question import (
    WARM_UP,
    Say,
    SpeedQuestion,
    failure,
    fused_adamw,
    timed,
    tokens_of,
)
from tutti.plan.job import PRECISIONS
from tutti.train.state.state import TORCH_DTYPES

NARROW = 0.1  # times the usual width: the multiple alone then says how wide a block is


def titan_is_here() -> bool:
    """Tell whether torchtitan is installed."""
    return importlib.util.find_spec("torchtitan") is not None


def torchtitan_speed(asked: SpeedQuestion, say: Say) -> dict[str, Any]:
    """Time torchtitan's model with its own way of compiling; weights in the dtype asked for."""
    precision = PRECISIONS[asked.precision]
    who = "torchtitan" + (", no masters" if precision.master else "")
    if asked.lora is not None:
        return {"who": who, "failed": "trains no adapters"}
    say(f"{asked.title}: {who}")
    gc.collect()
    accelerator, spec = open_accelerator(asked.device), asked.spec()
    accelerator.empty_cache()
    try:
        model, loss_of = _compiled_model(asked, accelerator)
    except (ImportError, AttributeError, TypeError, torch.OutOfMemoryError) as error:
        return {"who": who, **failure(error)}
    if model is None:
        return {"who": who, "failed": f"has no {asked.config()['model_type']} that is tried here"}
    accelerator.reset_peak()
    trained = list(model.parameters())
    optimizer = fused_adamw(trained)
    batches = [tokens_of(asked, spec, accelerator, i) for i in range(WARM_UP + asked.steps)]
    count = asked.micro_batch * asked.sequence_length

    def step(index: int) -> float:
        tokens, targets = batches[index]
        loss = loss_of(model(tokens), targets) / count
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    try:
        return timed(who, asked, spec, accelerator, step)
    except (RuntimeError, torch.OutOfMemoryError) as error:  # also what does not compile
        return {"who": who, **failure(error)}


def _compiled_model(asked: SpeedQuestion, accelerator: Accelerator) -> tuple[Any, Any]:
    """Return a model with random weights on the device, and its loss; None for other types."""
    logging.getLogger("torchtitan").setLevel(logging.WARNING)
    config = asked.config()
    build = {"llama": _llama, "qwen3": _qwen, "qwen3_moe": _qwen}.get(config["model_type"])
    if build is None:
        return None, None
    dtype = TORCH_DTYPES[PRECISIONS[asked.precision].parameters]
    with torch.device(accelerator.device):
        model = build(config, asked)
    for parameter in model.parameters():  # positions are complex numbers, and stay so
        parameter.data = parameter.data.to(dtype)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device(accelerator.device))
    _compile_blocks(model, experts="num_experts" in config)
    return model.train(), torch.compile(_titan_loss())


def _titan_loss() -> Any:
    from torchtitan.components.loss import cross_entropy_loss

    return cross_entropy_loss


def _compile_blocks(model: Any, *, experts: bool) -> None:
    """Compile each block as torchtitan does."""
    from torchtitan.config.job_config import Compile

    settings = Compile(enable=True)
    if experts:
        from torchtitan.models.llama4.infra.parallelize import apply_compile

        apply_compile(model, settings, False)
    else:
        from torchtitan.models.llama3.infra.parallelize import apply_compile as compile_dense

        compile_dense(model, settings)


def _shape(config: dict[str, Any], asked: SpeedQuestion) -> dict[str, Any]:
    return {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "vocab_size": config["vocab_size"],
        "norm_eps": config["rms_norm_eps"],
        "rope_theta": config.get("rope_theta", 10_000.0),
        "max_seq_len": asked.sequence_length,
    }


def _llama(config: dict[str, Any], asked: SpeedQuestion) -> Any:
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    width = config["intermediate_size"]
    shape = _shape(config, asked) | {"multiple_of": width, "ffn_dim_multiplier": NARROW}
    model = Transformer(TransformerModelArgs(**shape))
    if config.get("tie_word_embeddings"):  # it knows no such Llama: as a user would tie them
        model.output.weight = model.tok_embeddings.weight
    return model


def _qwen(config: dict[str, Any], asked: SpeedQuestion) -> Any:
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
    from torchtitan.models.qwen3.model.model import Qwen3Model

    shape = _shape(config, asked) | {
        "head_dim": config["head_dim"],
        "hidden_dim": config["intermediate_size"],
        "enable_weight_tying": bool(config.get("tie_word_embeddings")),
    }
    if "num_experts" in config:
        experts = MoEArgs(
            num_experts=config["num_experts"],
            num_shared_experts=0,
            top_k=config["num_experts_per_tok"],
            score_func="softmax",
            route_norm=bool(config["norm_topk_prob"]),
            score_before_experts=False,
            load_balance_coeff=None,
        )
        wide = config["moe_intermediate_size"]
        shape |= {"moe_enabled": True, "moe_inter_dim": wide, "moe_args": experts}
    return Qwen3Model(Qwen3ModelArgs(**shape))
