"""Rotary positions as tables of cosines and sines, with every way of stretching them.

A table belongs to a batch: it is made once and shared by all layers with the same settings. Where
a scaling depends on the length of a sequence (dynamic, longrope), each packed sequence counts its
own, so that packing changes nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tutti.accelerator.host_to_device import moved
from tutti.models import ModelSpec, RotaryScaling, RotarySpec

Table = tuple[Tensor, Tensor]  # cos and sin, (T, dim/2), float32


def rotary_specs(spec: ModelSpec) -> tuple[RotarySpec, ...]:
    """Return the distinct rotary settings of a model; a layer names its own by their index."""
    rotaries = dict.fromkeys(block.attention.rotary for block in spec.blocks)
    return tuple(rotary for rotary in rotaries if rotary is not None)


def table(
    spec: RotarySpec, positions: Tensor, sequence_of: Tensor, lengths: Sequence[int]
) -> Table:
    """Return cos and sin of every token: at `positions` of sequences with these lengths."""
    distinct = sorted({_relevant(spec, length) for length in lengths})
    turns = _turns(spec, tuple(distinct), positions.device)
    if len(distinct) > 1:
        row = torch.tensor([distinct.index(_relevant(spec, length)) for length in lengths])
        turns = turns[moved(row, positions.device)[sequence_of]]
    angles = positions.unsqueeze(1).float() * turns
    factor = spec.scaling.attention_factor if spec.scaling else 1.0
    return angles.cos() * factor, angles.sin() * factor


def table_at(spec: RotarySpec, positions_t: Tensor, lengths_t: Tensor) -> Table:
    """Return cos and sin of tokens at positions, each of a sequence of its own length.

    Both are on the device, and nothing is read from it.
    """
    scaling, device = spec.scaling, positions_t.device
    if scaling is None or scaling.kind not in ("dynamic", "longrope"):
        turns = _turns(spec, (0,), device)
    elif scaling.kind == "longrope":
        original = scaling.original_length or 0
        both = _turns(spec, (0, original + 1), device)
        turns = both[(lengths_t > original).long()]
    else:
        original = scaling.original_length or 1
        longer = lengths_t.clamp_min(original).double()
        reach = scaling.factor * longer / original - (scaling.factor - 1)
        theta = (spec.theta * reach ** (spec.dim / (spec.dim - 2))).float().unsqueeze(1)
        turns = 1.0 / theta ** (torch.arange(0, spec.dim, 2, device=device).float() / spec.dim)
    angles = positions_t.unsqueeze(1).float() * turns
    factor = scaling.attention_factor if scaling else 1.0
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def stretch(spec: ModelSpec) -> tuple[int, str] | None:
    """Return from which length on keys depend on their sequence's length, and how; None: never.

    "switch": beyond it all keys of a sequence are others. "grow": those of a prompt depend on the
    prompt's length, each later one on its own position.
    """
    factors = {
        (r.scaling.original_length or 0, "switch" if r.scaling.kind == "longrope" else "grow")
        for r in rotary_specs(spec)
        if r.scaling is not None and r.scaling.kind in ("dynamic", "longrope")
    }
    return min(factors, default=None)


@functools.lru_cache(maxsize=16)
def _turns(spec: RotarySpec, lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the frequencies for each length, on a device."""
    return moved(torch.stack([frequencies(spec, length) for length in lengths]), device)


def _relevant(spec: RotarySpec, length: int) -> int:
    """Return the length as far as it changes the frequencies."""
    scaling = spec.scaling
    if scaling is None or scaling.kind not in ("dynamic", "longrope"):
        return 0
    original = scaling.original_length or 0
    if length <= original:
        return 0
    return length if scaling.kind == "dynamic" else original + 1


def frequencies(spec: RotarySpec, length: int = 0) -> Tensor:
    """Return the angle per position of each pair (dim/2), in float32."""
    if spec.scaling is None:
        return _plain(spec.theta, spec.dim)
    return _SCALED[spec.scaling.kind](spec, spec.scaling, length)


def _plain(theta: float, dim: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim)


def _linear(spec: RotarySpec, scaling: RotaryScaling, length: int) -> Tensor:
    del length
    return _plain(spec.theta, spec.dim) / scaling.factor


def _dynamic(spec: RotarySpec, scaling: RotaryScaling, length: int) -> Tensor:
    """Stretch theta by how far a sequence goes beyond the length the model was made for."""
    original = scaling.original_length or 1
    reach = scaling.factor * max(length, original) / original - (scaling.factor - 1)
    return _plain(spec.theta * reach ** (spec.dim / (spec.dim - 2)), spec.dim)


def _ntk_alpha(spec: RotarySpec, scaling: RotaryScaling, length: int) -> Tensor:
    del length
    return _plain(spec.theta * (scaling.alpha or 1.0) ** (spec.dim / (spec.dim - 2)), spec.dim)


def _longrope(spec: RotarySpec, scaling: RotaryScaling, length: int) -> Tensor:
    long = length > (scaling.original_length or 0) and length > 0
    factors = torch.tensor(scaling.long_factors if long else scaling.short_factors)
    return 1.0 / (factors * spec.theta ** (torch.arange(0, spec.dim, 2).float() / spec.dim))


def _llama3(spec: RotarySpec, scaling: RotaryScaling, length: int) -> Tensor:
    """Slow turns are slowed by the factor, fast ones left, those between interpolated."""
    del length
    low, high = scaling.low_frequency_factor or 1.0, scaling.high_frequency_factor or 1.0
    original = scaling.original_length or 1
    plain = _plain(spec.theta, spec.dim)
    wavelength = 2 * math.pi / plain
    slowed = torch.where(wavelength > original / low, plain / scaling.factor, plain)
    share = (original / wavelength - low) / (high - low)
    between = (1 - share) * slowed / scaling.factor + share * slowed
    medium = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(medium, between, slowed)


def _yarn(spec: RotarySpec, scaling: RotaryScaling, length: int) -> Tensor:
    """Pairs that turn often stay, those that never turn once are slowed, a ramp lies between."""
    del length
    theta, dim, original = spec.theta, spec.dim, scaling.original_length or 1

    def pair_with(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(scaling.beta_fast or 32.0), pair_with(scaling.beta_slow or 1.0)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2).float() - low) / (high - low)).clamp(0, 1)
    powers = theta ** (torch.arange(0, dim, 2).float() / dim)
    kept = 1 - ramp
    return (1.0 / (scaling.factor * powers)) * (1 - kept) + (1.0 / powers) * kept


_SCALED: dict[str, Callable[[RotarySpec, RotaryScaling, int], Tensor]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "ntk_alpha": _ntk_alpha,
    "longrope": _longrope,
    "llama3": _llama3,
    "yarn": _yarn,
}
