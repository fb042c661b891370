"""What travels: a header and the bytes of a unit's tensors, nothing that could be run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

MOST_TOKENS = 1 << 24  # of a prompt
DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "bfloat16", "float16", "int8", "float8_e4m3fn")
}


class PartHeader(msgspec.Struct, frozen=True, array_like=True):
    """Some tokens of some heads of a unit."""

    key: str
    unit: int
    total: int  # tokens that are to come in all
    start: int
    heads: tuple[int, int]  # as the target counts them
    shapes: tuple[tuple[int, ...], ...]  # of one token, of each tensor
    dtypes: tuple[str, ...]


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(PartHeader)


def encoded(header: PartHeader) -> bytes:
    """Return a header as bytes."""
    return _encode(header)


def decoded(frames: Sequence[Any]) -> tuple[PartHeader, list[Tensor]]:
    """Return a header and its tensors (tokens first); ValueError for what is none."""
    try:
        header = _decoder.decode(frames[0])
        dtypes = [DTYPES[name] for name in header.dtypes]
    except (msgspec.DecodeError, KeyError, IndexError) as error:
        raise ValueError(f"no header: {error}") from None
    if len(frames) != 1 + len(dtypes) or len(header.shapes) != len(dtypes):
        raise ValueError(f"{len(frames) - 1} tensors; {len(dtypes)} were announced")
    if not 0 <= header.start < header.total <= MOST_TOKENS:
        raise ValueError(f"tokens from {header.start} on, of {header.total}")
    tensors = []
    for shape, dtype, data in zip(header.shapes, dtypes, frames[1:], strict=True):
        each = math.prod(shape) * dtype.itemsize
        if not each or len(data) % each or not len(data):
            raise ValueError(f"{len(data)} bytes; a token has {each}")
        flat = torch.frombuffer(bytearray(data), dtype=dtype)
        tensors.append(flat.view(-1, *shape))
    if len({len(tensor) for tensor in tensors}) > 1:
        raise ValueError("tensors of unlike length")
    if header.start + len(tensors[0]) > header.total:
        raise ValueError(f"tokens up to {header.start + len(tensors[0])} of {header.total}")
    return header, tensors


def dtype_name(dtype: torch.dtype) -> str:
    """Return what a dtype is called on the way."""
    return str(dtype).removeprefix("torch.")
