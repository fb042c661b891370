"""Stored tensors of a quantised weight to codes, scales and zeros: one form for every format.

An element is (code − zero) · scale. Integers up to 4 bits become −8 to 7, stored as 0 to 15, two
columns in a byte, the first in its low half; wider ones int8; 8-bit floats stay what they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tutti.errors import InputError
from tutti.huggingface.quantised.modules import Module
from tutti.huggingface.quantised.scheme import Scheme
from tutti.huggingface.tensor_file import Entry

Read = Callable[[Entry], Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each 4 bits of a word, lowest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A stored weight (out, in): codes, and what they are multiplied with."""

    codes: Tensor  # (out, in) float8 or int8; (out, in ÷ 2) uint8: two in a byte
    scales: Tensor  # (blocks of rows, blocks of columns)
    zeros: Tensor | None  # as the scales
    block: tuple[int, int]
    order: Tensor | None  # (in,): the input that each column belongs to


def stored_shape(scheme: Scheme, module: Module, read: Read) -> tuple[int, int]:
    """Return the shape of the weight that a module stands for, without reading its codes."""
    first = next(iter(module.parts))
    shape = module.parts[first].shape
    if len(shape) != 2:
        raise InputError(f"tensor '{module.first}' has the shape {list(shape)}; expected two sizes")
    if first == "weight":
        return shape[0], shape[1]
    if scheme.method == "awq":
        return shape[1] * 8, shape[0]
    if scheme.method == "gptq":
        (bits,) = scheme.bits
        return shape[1], shape[0] * 32 // bits
    said = read(module.part("weight_shape")).tolist()
    packed = {bits: math.ceil(said[-1] * bits / 32) for bits in scheme.bits} if said else {}
    if len(said) != 2 or said[0] != shape[0] or shape[1] not in packed.values():
        bits_text = " or ".join(map(str, sorted(scheme.bits)))
        raise InputError(
            f"tensor '{module.first}' {list(shape)}: a weight {said} of {bits_text} bits is "
            "packed otherwise"
        )
    return said[0], said[1]


def unpack(scheme: Scheme, module: Module, read: Read) -> Packed:
    """Return a weight's parts; tensors that do not fit together are named."""
    shape = stored_shape(scheme, module, read)
    if "weight" in module.parts:
        return _whole_bytes(scheme, module, shape, read)
    if scheme.method == "awq":
        return _awq(scheme, module, shape, read)
    if scheme.method == "gptq":
        return _gptq(scheme, module, shape, read)
    return _compressed(scheme, module, shape, read)


# --- whole bytes ---------------------------------------------------------------------------


def _whole_bytes(scheme: Scheme, module: Module, shape: tuple[int, int], read: Read) -> Packed:
    entry = module.part("weight_scale_inv", "weight_scale", "SCB")
    scales, block = _scales(read(entry), entry, shape, scheme.block)
    if entry.key.endswith(".SCB"):
        scales = scales.float() / 127
    zeros = None
    if "weight_zero_point" in module.parts:
        other = module.parts["weight_zero_point"]
        zeros_kept, own = _scales(read(other), other, shape, scheme.block)
        _expect(other, own == block, "a zero for each scale")
        zeros = zeros_kept.to(torch.int16)
    codes = read(module.parts["weight"])
    return Packed(codes=codes, scales=scales, zeros=_some(zeros), block=block, order=None)


def _scales(
    scales: Tensor, entry: Entry, shape: tuple[int, int], block: tuple[int, int] | None
) -> tuple[Tensor, tuple[int, int]]:
    """Return scales (blocks of rows, blocks of columns) and the size of a block."""
    out, width = shape
    if scales.numel() == 1:
        return scales.reshape(1, 1), (out, width)
    if scales.dim() <= 2 and scales.shape[0] == out and scales.numel() == out:
        return scales.reshape(out, 1), (1, width)
    if scales.dim() == 2 and block is not None:
        blocks = (math.ceil(out / block[0]), math.ceil(width / block[1]))
        if tuple(scales.shape) == blocks:
            return scales, block
    if scales.dim() == 2 and scales.shape[0] == out and width % scales.shape[1] == 0:
        return scales, (1, width // scales.shape[1])
    raise InputError(
        f"tensor '{entry.key}' {list(entry.shape)} has no scales for a weight {list(shape)}"
        + (f" in blocks of {block[0]} × {block[1]}" if block else "")
    )


# --- packed integers -----------------------------------------------------------------------


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """Return `count` unsigned numbers of each row of 32-bit words, lowest bits first: uint8."""
    rows = words.contiguous().view(torch.uint8).reshape(words.shape[0], -1)
    if bits == 8:
        return rows[:, :count]
    if bits in (2, 4):
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        parts = torch.bitwise_and(rows.unsqueeze(-1) >> shifts, (1 << bits) - 1)
        return parts.flatten(1)[:, :count]
    single = np.unpackbits(rows.numpy(), axis=1, bitorder="little")
    usable = single.shape[1] // bits * bits
    each = single[:, :usable].reshape(len(single), -1, bits)[:, :count]
    return torch.from_numpy(each @ (1 << np.arange(bits, dtype=np.uint8)))


def _coded(numbers: Tensor, bits: int) -> Tensor:
    """Return unsigned numbers (out, in) as codes around zero."""
    half = 1 << (bits - 1)
    if bits > 4:
        return (numbers.to(torch.int16) - half).to(torch.int8)
    nibbles = numbers + (8 - half)
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)


def _some(zeros: Tensor | None) -> Tensor | None:
    """Return zeros, or None where all of them are 0."""
    return None if zeros is None or not zeros.any() else zeros


def _awq(scheme: Scheme, module: Module, shape: tuple[int, int], read: Read) -> Packed:
    out, width = shape
    group = scheme.group or width
    at = torch.tensor(AWQ_ORDER).argsort()

    def columns(entry: Entry) -> Tensor:
        numbers = unpacked(read(entry), 4, out)
        return numbers.view(-1, out // 8, 8)[:, :, at].flatten(1).t().contiguous()

    scales = _grouped(module.part("scales"), shape, group, read)
    entry = module.part("qzeros")
    _expect(entry, entry.shape == (width // group, out // 8), f"{[width // group, out // 8]}")
    return Packed(
        codes=_coded(columns(module.part("qweight")), 4),
        scales=scales,
        zeros=_some(columns(entry).to(torch.int16) - 8),
        block=(1, group),
        order=None,
    )


def _gptq(scheme: Scheme, module: Module, shape: tuple[int, int], read: Read) -> Packed:
    out, width = shape
    group = scheme.group or width
    (bits,) = scheme.bits
    half = 1 << (bits - 1)
    scales = _grouped(module.part("scales"), shape, group, read)
    entry = module.part("qzeros")
    words = math.ceil(out * bits / 32)
    _expect(entry, entry.shape == (width // group, words), f"{[width // group, words]}")
    zeros = unpacked(read(entry), bits, out).t().to(torch.int16) + scheme.shift - half
    numbers = unpacked(read(module.part("qweight")).t(), bits, width)
    order = _order(module, "g_idx", width, group, read)
    if order is not None:
        numbers = numbers[:, order]
    return Packed(
        codes=_coded(numbers, bits),
        scales=scales,
        zeros=_some(zeros.contiguous()),
        block=(1, group),
        order=order,
    )


def _compressed(scheme: Scheme, module: Module, shape: tuple[int, int], read: Read) -> Packed:
    width = shape[1]
    packed = module.part("weight_packed")
    bits = next(b for b in scheme.bits if math.ceil(width * b / 32) == packed.shape[1])
    entry = module.part("weight_scale")
    scales, block = _scales(read(entry), entry, shape, None)
    zeros = None
    if "weight_zero_point" in module.parts:
        zero = module.parts["weight_zero_point"]
        count = scales.shape[0]
        words = math.ceil(count * bits / 32)
        _expect(zero, zero.shape == (words, scales.shape[1]), f"{[words, scales.shape[1]]}")
        half = 1 << (bits - 1)
        zeros = unpacked(read(zero).t(), bits, count).t().to(torch.int16) - half
    order = _order(module, "weight_g_idx", width, block[1], read)
    numbers = unpacked(read(packed), bits, width)
    if order is not None:
        numbers = numbers[:, order]
    return Packed(
        codes=_coded(numbers, bits),
        scales=scales,
        zeros=None if zeros is None else _some(zeros.contiguous()),
        block=block,
        order=order,
    )


def _grouped(entry: Entry, shape: tuple[int, int], group: int, read: Read) -> Tensor:
    """Return scales that are stored (groups, out), as (out, groups)."""
    out, width = shape
    fits = width % group == 0 and entry.shape == (width // group, out)
    _expect(entry, fits, f"{[width // max(1, group), out]} for groups of {group}")
    return read(entry).t().contiguous()


def _order(module: Module, name: str, width: int, group: int, read: Read) -> Tensor | None:
    """Return columns sorted by their group; None where they stand in that order already."""
    if name not in module.parts:
        return None
    entry = module.parts[name]
    groups = read(entry).long()
    if (groups < 0).any() and not (groups >= 0).any():  # "there are none"
        return None
    each = torch.bincount(groups.clamp_min(0), minlength=-(-width // group))
    even = groups.shape == (width,) and bool((groups >= 0).all()) and bool((each == group).all())
    _expect(entry, even, f"{group} columns in each of {width // group} groups")
    order = groups.argsort(stable=True)
    return None if bool((order == torch.arange(width)).all()) else order


def _expect(entry: Entry, fits: bool, expected: str) -> None:
    if not fits:
        raise InputError(f"tensor '{entry.key}' {list(entry.shape)}: expected {expected}")
