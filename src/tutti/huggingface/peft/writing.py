"""Writes trained adapters as a PEFT folder: adapter_config.json, adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tutti.errors import InputError
from tutti.huggingface.peft.layers import (
    EXPERT_MODULE,
    EXPERT_PARTS,
    LinearModule,
    expert_modules,
    linear_modules,
    module_path,
)
from tutti.huggingface.pieces import stored_rows
from tutti.models import ModelSpec
from tutti.models.tuning import DOWN, MAGNITUDE, UP, AdapterSpec, is_adapter

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def write_adapter(
    folder: Path, spec: ModelSpec, tensors: Mapping[str, Tensor], *, base: str
) -> None:
    """Write the adapters of a tuned model; `tensors` are all that were trained, by our names.

    `base` is the folder of the weights that they were trained on.
    """
    from safetensors.torch import save_file

    adapter = spec.tuning.adapter if spec.tuning is not None else None
    if adapter is None:
        raise InputError(f"{spec.name}: has no adapters to write; it was trained as a whole")
    tensors_by_key: dict[str, Tensor] = {}
    modules: list[LinearModule] = []
    for module in linear_modules(spec):
        names = [layer for layer in module.layers if f"{layer}.{UP}" in tensors]
        if not names:
            continue
        modules.append(module)
        tensors_by_key |= _linear(module, tensors, spec)
    parameters: set[str] = set()
    for unit, path in expert_modules(spec).items():
        written, own = _experts(unit, path, tensors)
        tensors_by_key |= written
        parameters |= own
    whole = {name: value for name, value in tensors.items() if not is_adapter(name)}
    saved = {name: module_path(spec, name) for name in whole}
    tensors_by_key |= {f"{_PREFIX}{saved[name]}": value for name, value in whole.items()}
    config = _config(spec, adapter, modules, parameters, base)
    if saved:
        config["modules_to_save"] = sorted({key.rpartition(".")[0] for key in saved.values()})
    folder.mkdir(parents=True, exist_ok=True)
    plain = {key: value.detach().contiguous().clone() for key, value in tensors_by_key.items()}
    save_file(plain, str(folder / WEIGHTS_FILE), metadata={"format": "pt"})
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def _linear(
    module: LinearModule, tensors: Mapping[str, Tensor], spec: ModelSpec
) -> dict[str, Tensor]:
    """Return a module's factors; those of fused layers are one pair."""
    holders = [layer for layer in module.layers if f"{layer}.{DOWN}" in tensors]
    if len(holders) != 1:
        raise InputError(
            f"{spec.name}: '{module.path}' is one module, and its layers have {len(holders)} down "
            "factors; PEFT has one: adapt all of its layers together"
        )
    down = tensors[f"{holders[0]}.{DOWN}"]
    outputs = module.parts[0][1].shape[1 if module.is_transposed else 0]
    up = down.new_zeros(outputs, down.shape[0])
    lengths = down.new_zeros(outputs)
    scaled = False
    for layer, (_, piece) in zip(module.layers, module.parts, strict=True):
        numbers = stored_rows(piece)
        assert numbers is not None, "a linear module has a matrix"
        rows = torch.from_numpy(numbers)
        if f"{layer}.{UP}" in tensors:
            up[rows] = tensors[f"{layer}.{UP}"]
        if f"{layer}.{MAGNITUDE}" in tensors:
            scaled = True
            lengths[rows] = tensors[f"{layer}.{MAGNITUDE}"]
    key = f"{_PREFIX}{module.path}"
    pair = {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}
    return {**pair, f"{key}.lora_magnitude_vector": lengths} if scaled else pair


def _experts(
    unit: int, path: str, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], set[str]]:
    """Return the factors of a block's experts, and which of their parameters have some."""
    present = {
        part: layers
        for part, layers in EXPERT_PARTS.items()
        if f"{unit}.{layers[-1]}.{UP}" in tensors
    }
    matrices: dict[str, Tensor] = {}
    for number, (_, layers) in enumerate(present.items()):
        held = [f"{unit}.{layer}" for layer in layers if f"{unit}.{layer}.{UP}" in tensors]
        inner = "base_layer." * (len(present) - 1 - number)
        down = tensors[f"{held[0]}.{DOWN}"]
        up = torch.cat([tensors[f"{layer}.{UP}"] for layer in held], dim=1)
        key = f"{_PREFIX}{path}.{inner}"
        matrices[f"{key}lora_A.weight"] = down.flatten(0, 1)
        matrices[f"{key}lora_B.weight"] = up.permute(1, 2, 0).flatten(1)
    return matrices, {f"{EXPERT_MODULE}.{part}" for part in present}


def _config(
    spec: ModelSpec,
    adapter: AdapterSpec,
    modules: list[LinearModule],
    parameters: set[str],
    base: str,
) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if spec.head.scores else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": adapter.rank_stabilised,
        "use_dora": adapter.method == "dora",
        "fan_in_fan_out": any(module.is_transposed for module in modules),
        "target_modules": _target_modules(spec, modules),
        "target_parameters": sorted(parameters) or None,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _target_modules(spec: ModelSpec, modules: list[LinearModule]) -> list[str]:
    """Return the modules by their last names where these mean no others, else by their paths."""
    chosen = {module.path for module in modules}
    names = {path.rpartition(".")[2] for path in chosen}
    meant = {m.path for m in linear_modules(spec) if m.path.rpartition(".")[2] in names}
    return sorted(names if meant == chosen else chosen)
