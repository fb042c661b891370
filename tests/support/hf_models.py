"""Tiny transformers models with random weights, and their folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers


def tiny_model(values: dict[str, Any], dtype: Any = torch.float32) -> Any:
    """Return a transformers model with random weights, biases and norms too."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**{**values, "pad_token_id": 0})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for tensor in (*model.parameters(), *_saved_buffers(model)):
            tensor.normal_(0, 0.05)
    return model


def _saved_buffers(model: Any) -> list[Any]:
    saved = model.state_dict()
    return [tensor for name, tensor in model.named_buffers() if name in saved]


def saved(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder
