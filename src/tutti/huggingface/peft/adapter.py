"""LoRA adapters: PEFT folders (adapter_config.json, adapter_model.safetensors) by our names.

An adapter adds B·A·scale to some weights: A (rank, in), B (out, rank). Which of a model's tensors
it adds to follows from the model's weight map, as for the weights themselves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tutti import files
from tutti.document import shown
from tutti.errors import InputError
from tutti.huggingface.maps import key_table
from tutti.huggingface.pieces import stored_rows
from tutti.huggingface.tensor_file import TensorFile
from tutti.huggingface.tensors import to_torch
from tutti.models import ModelSpec

_CONFIG, _WEIGHTS, _OLD = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight"
)
# settings that change what an adapter computes, with the values that change nothing
_PLAIN: dict[str, tuple[object, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "modules_to_save": ([], None),
    "target_parameters": ([], None),
    "trainable_token_indices": ([], {}, None),
    "layer_replication": ([], None),
    "lora_bias": (False, None),
    "alora_invocation_tokens": ([], None),
    "use_qalora": (False, None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """What is added to one tensor: up · down; the scale is in `up`."""

    down: Tensor  # (rank, in)
    up: Tensor  # (out, rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter for one model."""

    folder: Path
    rank: int  # the largest
    factors: Mapping[str, Factors]  # by logical name: "3.attention.query.weight"


def open_adapter(folder: Path | str, spec: ModelSpec) -> Adapter:
    """Read a PEFT folder for a model; what does not fit it is one line."""
    folder = Path(folder)
    config = _config(folder)
    pairs = _pairs(folder)
    modules = list(pairs)
    table = key_table(spec, [f"{module}.weight" for module in modules])
    factors: dict[str, Factors] = {}
    for module, (down, up) in pairs.items():
        parts = table.stored.get(f"{module}.weight")
        if parts is None:
            raise InputError(
                f"{folder}: adapts '{module}', which {spec.name} does not have; the adapter is for "
                f"another model ({shown(config.get('base_model_name_or_path'))})"
            )
        shape = parts[0][1].shape
        width, out = shape if parts[0][1].order else (shape[-1], shape[0])
        if down.shape[1] != width or up.shape[0] != out or down.shape[0] != up.shape[1]:
            raise InputError(
                f"{folder}: '{module}': A {list(down.shape)} and B {list(up.shape)}; a weight "
                f"[{out}, {width}] of {spec.name} takes [rank, {width}] and [{out}, rank]: the "
                "adapter is for another model"
            )
        scaled = up * _scale(config, module, down.shape[0])
        for name, piece in parts:
            rows = stored_rows(piece)
            if rows is None:
                raise InputError(f"{folder}: adapts '{module}', which is no linear layer")
            factors[name] = Factors(down=down, up=scaled[torch.from_numpy(rows)])
    return Adapter(
        folder=folder, rank=max(own.down.shape[0] for own in factors.values()), factors=factors
    )


def _config(folder: Path) -> dict[str, Any]:
    files.require_folder(folder)
    path = folder / _CONFIG
    if not path.is_file():
        raise InputError(f"{folder}: holds no {_CONFIG}; an adapter is a folder that PEFT saved")
    config = files.parse_json(files.read_text(path), str(path))
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else config
        raise InputError(f"{path}: 'peft_type' is {shown(kind)}; tutti serves LORA")
    for key, plain in _PLAIN.items():
        if key in config and config[key] not in plain:
            raise InputError(f"{path}: '{key}' is {shown(config[key])}; tutti serves plain LoRA")
    alpha = config.get("lora_alpha")
    if not isinstance(alpha, int | float):
        raise InputError(f"{path}: 'lora_alpha' is {shown(alpha)}; expected a number")
    _check_patterns(path, config)
    return config


def _check_patterns(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse modules' own scales that are none: patterns of names with numbers."""
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise InputError(f"{path}: 'alpha_pattern' is {shown(patterns)}; expected a mapping")
    for pattern, alpha in patterns.items():
        if not isinstance(alpha, int | float):
            raise InputError(
                f"{path}: 'alpha_pattern' of {shown(pattern)} is {shown(alpha)}; expected a number"
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise InputError(
                f"{path}: 'alpha_pattern' has {shown(pattern)}, which is no pattern ({error})"
            ) from None


def _pairs(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B by the module that they adapt, in float32."""
    path = folder / _WEIGHTS
    if not path.is_file():
        old = (
            f"; it has {_OLD}: save it again with safe_serialization"
            if (folder / _OLD).is_file()
            else ""
        )
        raise InputError(f"{folder}: holds no {_WEIGHTS}{old}")
    file = TensorFile(path)
    sides: dict[str, dict[str, Tensor]] = {}
    for key, entry in file.entries.items():
        match = _KEY.fullmatch(key)
        if match is None or len(entry.shape) != 2:
            raise InputError(
                f"{path}: tensor '{key}' {list(entry.shape)} is no A or B of a linear layer; tutti "
                "serves LoRA on linear layers alone"
            )
        read = to_torch(file.array(key).copy(), entry.dtype).float()
        sides.setdefault(match["module"], {})[match["side"]] = read
    if not sides:
        raise InputError(f"{path}: holds no tensor")
    for module, own in sides.items():
        for side in "AB":
            if side not in own:
                raise InputError(f"{path}: tensor '{module}.lora_{side}.weight' is missing")
    return {module: (own["A"], own["B"]) for module, own in sides.items()}


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return what B·A is multiplied with; patterns say otherwise for some modules."""
    alpha = config["lora_alpha"]
    for pattern, own in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = own
            break
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
