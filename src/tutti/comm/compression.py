"""Lossy compression of messages between islands, with error feedback; off unless asked for.

A reduction's message is rounded to bf16, or to fp8 with a power-of-two scale per block; what
rounding lost is kept and added to the same message of the next call, so that errors do not pile up
over steps. A message that is only passed on is rounded at its source too: all ranks end with the
same bits. Rounding twice changes nothing, so it does not matter how often a message is forwarded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from tutti.comm.frames import Tag
from tutti.comm.spans import Spans
from tutti.errors import InputError, hint

_BLOCK = 1024  # elements that share a scale
_FP8 = torch.float8_e4m3fn
_FP8_MOST = 448.0


class Rounding(Protocol):
    """A format that numbers are rounded to."""

    def num_bytes(self, elements: int) -> int:
        """Return the size of a message of so many numbers."""

    def encode(self, values: Tensor) -> Tensor:
        """Return the message of float32 numbers, as bytes."""

    def decode(self, message: Tensor, elements: int) -> Tensor:
        """Return the float32 numbers of a message."""


class Bf16:
    """Two bytes a number, the range of float32."""

    def num_bytes(self, elements: int) -> int:
        """Return two bytes each."""
        return 2 * elements

    def encode(self, values: Tensor) -> Tensor:
        """Round to nearest."""
        return values.to(torch.bfloat16).view(torch.uint8)

    def decode(self, message: Tensor, elements: int) -> Tensor:
        """Widen again."""
        return message.view(torch.bfloat16)[:elements].float()


class Fp8:
    """One byte a number, and a scale for every block."""

    def num_bytes(self, elements: int) -> int:
        """Return one byte each, and four per block."""
        return elements + 4 * -(-elements // _BLOCK)

    def encode(self, values: Tensor) -> Tensor:
        """Scale every block by a power of two that makes its largest number fit."""
        count = values.numel()
        blocks = torch.nn.functional.pad(values, (0, -count % _BLOCK)).view(-1, _BLOCK)
        largest = blocks.abs().amax(dim=1)
        exponent = torch.ceil(torch.log2(largest.clamp_min(1e-30) / _FP8_MOST))
        scale = torch.exp2(exponent.clamp(-100, 100))
        packed = (blocks / scale[:, None]).clamp(-_FP8_MOST, _FP8_MOST).to(_FP8)
        data = packed.view(torch.uint8).reshape(-1)[:count]
        return torch.cat([scale.view(torch.uint8), data])

    def decode(self, message: Tensor, elements: int) -> Tensor:
        """Scale back."""
        head = 4 * -(-elements // _BLOCK)
        scale = message[:head].clone().view(torch.float32)
        values = message[head : head + elements].view(_FP8).float()
        return values * scale.repeat_interleave(_BLOCK)[:elements]


_ROUNDINGS: dict[str, Rounding] = {"bf16": Bf16(), "fp8": Fp8()}
NAMES = tuple(_ROUNDINGS)


class Residuals:
    """What rounding lost, per message of a repeated operation."""

    def __init__(self) -> None:
        self._lost: dict[object, Tensor] = {}

    def take(self, key: object, like: Tensor) -> Tensor | None:
        """Return what was lost last time; None the first time, or after a change of size."""
        lost = self._lost.pop(key, None)
        return lost if lost is not None and lost.numel() == like.numel() else None

    def keep(self, key: object, lost: Tensor) -> None:
        """Remember what was lost."""
        self._lost[key] = lost


class Codec:
    """Rounds the messages of one operation."""

    def __init__(self, name: str, residuals: Residuals, stream: object) -> None:
        if name not in _ROUNDINGS:
            raise InputError(f"compress: '{name}'; {hint(name, _ROUNDINGS)}")
        self._rounding = _ROUNDINGS[name]
        self._residuals = residuals
        self._stream = stream  # what repeats: errors are fed back to the same stream

    def encoded_bytes(self, spans: Spans) -> int:
        """Return the bytes of a message on the wire."""
        return self._rounding.num_bytes(spans.num_bytes // spans.itemsize)

    def encode(self, peer: int, tag: Tag, spans: Spans, *, keep: bool) -> Spans:
        """Return the rounded message; `keep`: its source keeps the rounded numbers as well."""
        values = torch.cat([tensor.float() for tensor in spans.tensors])
        if keep:
            message = self._rounding.encode(values)
            self._write(spans, self._rounding.decode(message, values.numel()))
            return Spans([message])
        key = (self._stream, peer, tag[2:])
        lost = self._residuals.take(key, values)
        if lost is not None:
            values = values + lost
        message = self._rounding.encode(values)
        self._residuals.keep(key, values - self._rounding.decode(message, values.numel()))
        return Spans([message])

    @staticmethod
    def _write(spans: Spans, values: Tensor) -> None:
        at = 0
        for tensor in spans.tensors:
            tensor.copy_(values[at : at + tensor.numel()])
            at += tensor.numel()

    def decoder(self, spans: Spans) -> Callable[[Tensor], Tensor]:
        """Return the function from a message's bytes to those of the numbers it stands for."""
        elements, dtype = spans.num_bytes // spans.itemsize, spans.tensors[0].dtype

        def decode(message: Tensor) -> Tensor:
            return self._rounding.decode(message, elements).to(dtype).view(torch.uint8)

        return decode
