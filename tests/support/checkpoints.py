"""Hugging Face folders made without torch or transformers: every number is known."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tutti.huggingface.dtypes import BY_CODE
from tutti.huggingface.maps import key_table
from tutti.huggingface.tensor_file import Entry, header_bytes
from tutti.models import read_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray], code: str = "F32") -> None:
    """Write arrays of unsigned integers as a safetensors file."""
    entries, at = {}, 0
    for key, array in tensors.items():
        stop = at + array.nbytes
        entries[key] = Entry(key=key, dtype=BY_CODE[code], shape=array.shape, start=at, stop=stop)
        at = stop
    with path.open("wb") as stream:
        stream.write(header_bytes(entries, {"format": "pt"}))
        for array in tensors.values():
            stream.write(array.tobytes())


def stored_tensors(config: Mapping[str, Any] = LLAMA, code: str = "F32") -> dict[str, np.ndarray]:
    """Return every tensor of a model under its key in the files; no two numbers are equal."""
    table = key_table(read_config(config, "model"))
    found: dict[str, np.ndarray] = {}
    at = 1
    for key, parts in table.stored.items():
        if all(table.tensors[name].parameter.tied_to for name, _ in parts):
            continue
        shape = parts[0][1].shape
        count = math.prod(shape)
        found[key] = np.arange(at, at + count, dtype=BY_CODE[code].raw).reshape(shape)
        at += count
    return found


def write_folder(
    folder: Path,
    config: Mapping[str, Any] = LLAMA,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write a Hugging Face folder with a tokenizer file beside the weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "templates").mkdir()
    (folder / "templates" / "chat.jinja").write_text("{{ messages }}")
    write_tensors(folder / "model.safetensors", tensors or stored_tensors(config))
    return folder


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return all files of a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
