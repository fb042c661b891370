"""GGUF files of Llama-like models in: dequantised, under our names, as a Hugging Face folder.

llama.cpp stores query and key rows so that rotated pairs lie side by side; that order is undone.
Numbers come out as float32, exactly what the quantised blocks stand for, unless another format is
asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tutti.errors import InputError
from tutti.huggingface.checkpoint import Checkpoint, StoredFile
from tutti.huggingface.conversion import Conversion, Progress, Work, carry_out
from tutti.huggingface.dtypes import BY_NAME, Dtype
from tutti.huggingface.gguf_tokenizer import tokenizer_files
from tutti.huggingface.hf_folder import INDEX
from tutti.huggingface.maps import key_table
from tutti.huggingface.outputs import Formats, index_text, stored_files
from tutti.huggingface.pieces import Bounds
from tutti.huggingface.tensor_file import Raw
from tutti.huggingface.workspace import Workspace, require_free
from tutti.models import read_config

_ENDS = {"0.token": "token_embd", "norm": "output_norm", "logits": "output"}
_BLOCK = {
    "attention_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "attention.query": "attn_q",
    "attention.key": "attn_k",
    "attention.value": "attn_v",
    "attention.output": "attn_output",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
}


def convert_gguf(
    source: Path,
    target: Path,
    *,
    dtype: Dtype | None = None,
    progress: Progress = lambda _doing, _done, _whole: None,
) -> Conversion:
    """Write a GGUF file as a Hugging Face folder."""
    require_free(target, resume=False)
    checkpoint = GgufCheckpoint(source)
    formats = Formats(checkpoint, dtype)
    files = tuple(stored_files(checkpoint, key_table(checkpoint.spec), formats))
    texts = {
        "config.json": _text({**checkpoint.config, "dtype": (dtype or FLOAT32).name}),
        "generation_config.json": _text(_generation(checkpoint.config)),
        **tokenizer_files(checkpoint.fields, str(source)),
    }
    if len(files) > 1:
        texts[INDEX] = index_text(files)
    with Workspace(target, {"source": str(source)}, resume=False) as space:
        work = Work(files=files, copied=(), texts=texts)
        return carry_out(checkpoint, "hf", work, None, space, progress)


FLOAT32 = BY_NAME["float32"]


class GgufCheckpoint(Checkpoint):
    """The weights in a GGUF file."""

    def __init__(self, path: Path) -> None:
        self._gguf, reader = _open(path)
        self.fields: dict[str, Any] = {
            name: field.contents() for name, field in reader.fields.items()
        }
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.config = _config(self.fields, self._tensors.keys(), path)
        super().__init__(path.parent, read_config(self.config, path.stem))
        self._path = path
        self._last: tuple[str, NDArray[np.float32]] | None = None
        self._check()

    def _check(self) -> None:
        needed = {
            name: self._stored_name(name) for name in self.names() if self.owner(name) == name
        }
        for name, key in needed.items():
            if key not in self._tensors:
                shape = list(self.parameter(name).shape)
                raise InputError(f"{self._path}: tensor '{key}' is missing; expected {shape}")
            sizes = tuple(int(size) for size in reversed(self._tensors[key].shape))
            if sizes != self.parameter(name).shape:
                raise InputError(
                    f"{self._path}: tensor '{key}': expected {list(self.parameter(name).shape)}, "
                    f"found {list(sizes)}"
                )
        extra = set(self._tensors) - set(needed.values())
        if extra:
            raise InputError(
                f"{self._path}: tensor '{min(extra)}' is no tensor of this model; expected none of "
                "that name"
            )

    def _stored_name(self, name: str) -> str:
        unit, _, rest = name.partition(".")
        module, _, leaf = rest.rpartition(".")
        if unit == "0":
            return f"{_ENDS[f'0.{module}']}.{leaf}"
        if int(unit) == self.spec.head_unit:
            return f"{_ENDS[module]}.{leaf}"
        return f"blk.{int(unit) - 1}.{_BLOCK[module]}.{leaf}"

    def dtype(self, name: str) -> Dtype:
        """Return float32: what the blocks stand for."""
        del name
        return FLOAT32

    def raw(self, name: str, bounds: Bounds) -> Raw:
        """Return the bytes of a slice."""
        inside = tuple(slice(a, b) for a, b in bounds)
        return self._dequantised(self.owner(name))[inside].copy().view(np.uint32)

    def _dequantised(self, name: str) -> NDArray[np.float32]:
        if self._last is None or self._last[0] != name:
            tensor = self._tensors[self._stored_name(name)]
            numbers = self._gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            numbers = numbers.astype(np.float32, copy=False).reshape(self.parameter(name).shape)
            self._last = (name, self._unpaired(name, numbers))
        return self._last[1]

    def _unpaired(self, name: str, numbers: NDArray[np.float32]) -> NDArray[np.float32]:
        """Put the two halves of each rotated head below each other again."""
        if ".attention.query." not in name and ".attention.key." not in name:
            return numbers
        heads = self.parameter(name).slice_parts
        pairs = numbers.reshape(heads, numbers.shape[0] // heads // 2, 2, *numbers.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(numbers.shape)

    def drop(self) -> None:
        """Nothing is mapped that could be given back; one tensor is kept."""

    @property
    def stored(self) -> Mapping[str, StoredFile]:
        """None: the weights never were in Hugging Face files."""
        return {}

    @property
    def carried(self) -> Mapping[str, Dtype]:
        """None."""
        return {}

    def carried_raw(self, key: str) -> Raw:
        """Raise KeyError: nothing is carried."""
        raise KeyError(key)

    def plain_files(self) -> tuple[str, ...]:
        """None: everything is in the one file."""
        return ()

    def identity(self) -> object:
        """Return the file's size and time."""
        stat = self._path.stat()
        return [stat.st_size, stat.st_mtime_ns]


def _open(path: Path) -> tuple[Any, Any]:
    try:
        import gguf
    except ModuleNotFoundError:
        raise InputError(
            f"{path}: reading it needs the package gguf: pip install 'tutti-ml[gguf]'"
        ) from None
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        return gguf, gguf.GGUFReader(path)
    except (ValueError, OSError, KeyError, IndexError) as error:
        raise InputError(f"{path}: no GGUF file, or cut short ({error})") from None


def _config(fields: Mapping[str, Any], tensors: Any, path: Path) -> dict[str, Any]:
    """Return the config.json that the file's fields amount to."""
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise InputError(
            f"{path}: its architecture is '{architecture}'; of GGUF files tutti reads 'llama' only"
        )
    if "rope_freqs.weight" in tensors:
        raise InputError(f"{path}: has scaled rotary frequencies, which tutti does not read")

    def field(name: str) -> Any:
        if f"llama.{name}" not in fields:
            raise InputError(f"{path}: 'llama.{name}' is missing")
        return fields[f"llama.{name}"]

    hidden, heads = field("embedding_length"), field("attention.head_count")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": fields.get("llama.attention.key_length", hidden // heads),
        "vocab_size": len(fields.get("tokenizer.ggml.tokens", ())),
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": _decimal(field("attention.layer_norm_rms_epsilon")),
        "rope_theta": _decimal(fields.get("llama.rope.freq_base", 10_000.0)),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    for key in ("bos", "eos"):
        token = fields.get(f"tokenizer.ggml.{key}_token_id")
        config[f"{key}_token_id"] = None if token is None else int(token)
    padding = fields.get("tokenizer.ggml.padding_token_id")
    return config | ({} if padding is None else {"pad_token_id": int(padding)})


def _decimal(number: float) -> float:
    """Return the short decimal that was rounded to this float32: 1e-05 for 9.9999997e-06."""
    return float(str(np.float32(number)))


def _generation(config: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {key: config[key] for key in keys if config.get(key) is not None}


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"
