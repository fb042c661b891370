"""The plain loop of a user of transformers, without and with Liger's kernels."""

from __future__ import annotations

import gc
import importlib.util
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
from tutti.models.tuning import AdapterSpec
from tutti.plan.job import PRECISIONS
from tutti.train.state.state import TORCH_DTYPES


def hugging_face_speed(asked: SpeedQuestion, say: Say, *, liger: bool = False) -> dict[str, Any]:
    """Time the plain loop: from_config, SDPA, loss by labels, fused AdamW on the weights held.

    With `liger`, its kernels take the place of transformers' own, for the rest of the process.
    """
    precision = PRECISIONS[asked.precision]
    who = "transformers + Liger" if liger else "transformers"
    who += " + peft" if asked.lora else ""
    who += ", no masters" if precision.master else ""
    say(f"{asked.title}: {who}")
    gc.collect()
    if not _is_known(asked.config()["model_type"]):
        return {"who": who, "failed": f"has no {asked.config()['model_type']}"}
    accelerator, spec = open_accelerator(asked.device), asked.spec()
    accelerator.empty_cache()
    accelerator.reset_peak()
    try:
        model, attention = _peer_model(asked, accelerator)
    except (ImportError, ValueError, KeyError, torch.OutOfMemoryError) as error:
        return {"who": who, **failure(error)}
    try:
        if liger and not _with_liger(model):
            return {"who": who, "failed": f"has no kernels for {model.config.model_type}"}
    except ImportError as error:
        return {"who": who, **failure(error)}
    if asked.lora is not None:
        if importlib.util.find_spec("peft") is None:
            return {"who": who, "failed": "peft is not installed"}
        model = _with_adapters(model, asked.lora)
    model.train()
    if asked.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = fused_adamw(trained)
    batches = [tokens_of(asked, spec, accelerator, i) for i in range(WARM_UP + asked.steps)]

    def step(index: int) -> float:
        tokens, _ = batches[index]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    try:
        return {**timed(who, asked, spec, accelerator, step), "attention": attention}
    except torch.OutOfMemoryError as error:
        return {"who": who, **failure(error)}


def _is_known(model_type: str) -> bool:
    """Tell whether this version of transformers has a type; its own refusal lists all it has."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def _peer_model(asked: SpeedQuestion, accelerator: Accelerator) -> tuple[Any, str]:
    """Return transformers' model on the device, and its attention: SDPA where it has that."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = _with_factor(asked.config())
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.use_cache = False
    dtype = TORCH_DTYPES[PRECISIONS[asked.precision].parameters]
    make: Any = AutoModelForCausalLM.from_config
    with torch.device(accelerator.device):
        try:
            return make(config, attn_implementation="sdpa", dtype=dtype), "sdpa"
        except ValueError:  # gpt-oss has sinks, which SDPA does not know
            return make(config, attn_implementation="eager", dtype=dtype), "eager"


def _with_factor(values: dict[str, Any]) -> dict[str, Any]:
    """Return a config whose scaled positions have the factor that transformers asks for."""
    scaling = values.get("rope_scaling") or {}
    original = scaling.get("original_max_position_embeddings")
    if not original or "factor" in scaling:
        return values
    factor = values["max_position_embeddings"] / original
    return {**values, "rope_scaling": {**scaling, "factor": factor}}


def _with_liger(model: Any) -> bool:
    """Put Liger's kernels into a model; tell whether it has some for it."""
    from liger_kernel.transformers import monkey_patch

    if model.config.model_type not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        return False
    monkey_patch._apply_liger_kernel_to_instance(model=model)
    return True


def _with_adapters(model: Any, rank: int) -> Any:
    """Freeze a model and let peft train adapters of every linear layer, in the model's dtype."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank,
        lora_alpha=int(AdapterSpec().alpha),
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config, autocast_adapter_dtype=False)
