"""LoRA adapters as PEFT saves them, and the merged weights that they stand for, both by hand."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

QUERY_VALUE = ("q_proj", "v_proj")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    plain: Path,
    target: Path,
    *,
    modules: Sequence[str] = QUERY_VALUE,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 0,
    transposed: bool = False,
    **config: Any,
) -> Path:
    """Write an adapter for a model's folder; return a folder with the merged weights."""
    generator = torch.Generator().manual_seed(seed)
    merged = load_file(plain / "model.safetensors")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    tensors: dict[str, torch.Tensor] = {}
    for key in list(merged):
        module = key.removesuffix(".weight")
        if module == key or module.rpartition(".")[2] not in modules:
            continue
        out, width = merged[key].shape[::-1] if transposed else merged[key].shape
        down = torch.randn(rank, width, generator=generator) * 0.2
        up = torch.randn(out, rank, generator=generator) * 0.2
        tensors[f"base_model.model.{module}.lora_A.weight"] = down
        tensors[f"base_model.model.{module}.lora_B.weight"] = up
        own = next(
            (a / rank for p, a in config.get("alpha_pattern", {}).items() if module.endswith(p)),
            scale,
        )
        added = up @ down * own
        merged[key] = merged[key] + (added.t() if transposed else added)
    values = {
        "peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(modules),
        "bias": "none", "use_dora": False, "base_model_name_or_path": "somewhere/a-model", **config,
    }  # fmt: skip
    target.mkdir(parents=True)
    (target / "adapter_config.json").write_text(json.dumps(values))
    save_file(tensors, target / "adapter_model.safetensors")
    twin = target.parent / f"{target.name}-merged"
    shutil.copytree(plain, twin)
    save_file({k: t.contiguous() for k, t in merged.items()}, twin / "model.safetensors")
    return twin
