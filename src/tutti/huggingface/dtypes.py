"""Number formats of tensors, as safetensors files, torch and people call them.

A conversion moves bytes and never looks at the numbers, so a format is known here by its width
alone; `raw` is the numpy type that carries it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tutti.errors import InputError, hint


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtype:
    """One number format."""

    code: str  # in a safetensors header
    name: str  # as torch calls it
    num_bytes: int
    floating: bool = False

    @property
    def raw(self) -> np.dtype[np.unsignedinteger]:
        """The numpy type of the same width that carries its bytes."""
        return np.dtype(f"u{self.num_bytes}")


def _dtype(code: str, name: str, num_bytes: int) -> Dtype:
    return Dtype(code=code, name=name, num_bytes=num_bytes, floating=code.startswith(("F", "BF")))


_ALL = (
    _dtype("F64", "float64", 8),
    _dtype("F32", "float32", 4),
    _dtype("F16", "float16", 2),
    _dtype("BF16", "bfloat16", 2),
    _dtype("F8_E4M3", "float8_e4m3fn", 1),
    _dtype("F8_E5M2", "float8_e5m2", 1),
    _dtype("I64", "int64", 8),
    _dtype("I32", "int32", 4),
    _dtype("I16", "int16", 2),
    _dtype("I8", "int8", 1),
    _dtype("U64", "uint64", 8),
    _dtype("U32", "uint32", 4),
    _dtype("U16", "uint16", 2),
    _dtype("U8", "uint8", 1),
    _dtype("BOOL", "bool", 1),
)
BY_CODE: Mapping[str, Dtype] = {dtype.code: dtype for dtype in _ALL}
BY_NAME: Mapping[str, Dtype] = {dtype.name: dtype for dtype in _ALL}
# What `--dtype` takes.
WEIGHTS: Mapping[str, Dtype] = {
    "fp32": BY_NAME["float32"],
    "fp16": BY_NAME["float16"],
    "bf16": BY_NAME["bfloat16"],
    "float32": BY_NAME["float32"],
    "float16": BY_NAME["float16"],
    "bfloat16": BY_NAME["bfloat16"],
}


def weight_dtype(text: str) -> Dtype:
    """Return the format that a person asked weights to be written in."""
    if text not in WEIGHTS:
        raise InputError(f"--dtype is '{text}'; {hint(text, WEIGHTS)}")
    return WEIGHTS[text]
