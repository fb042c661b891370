"""Seconds of one operator on one chip: matrix products, attention, memory-bound kernels.

A product is a roofline over tiles: waves of tiles over the compute units, a fixed fill per tile,
memory traffic, the gap between kernels. Fused attention has an efficiency of its own; unfused
attention is products plus traffic on the scores. Everything broadcasts over strategies.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti.cost.arrays import FloatArray, Machine, Number, Shape, Strategy
from tutti.cost.constants import Constants

# Rows, columns, and the rate of a tile relative to the largest one.
TILES: tuple[tuple[float, float, float], ...] = (
    (128.0, 256.0, 1.0),
    (128.0, 128.0, 0.93),
    (64.0, 64.0, 0.70),
)
ELEMENT_BYTES = 2.0  # of activations and weights in products
FLASH_BLOCK = 128.0  # the causal mask is cut at blocks of this many positions
FLASH_BACKWARD_FLOPS = 2.5  # backward makes the scores again: five products against two


class Passes(NamedTuple):
    """Seconds of an operator's passes."""

    forward: FloatArray
    backward_input: FloatArray
    backward_weight: FloatArray

    @property
    def backward(self) -> FloatArray:
        """Both parts of the backward pass."""
        return self.backward_input + self.backward_weight

    def plus(self, other: Passes, share: Number = 1.0) -> Passes:
        """Return both after each other, `share` of the other one."""
        return Passes(*(a + share * b for a, b in zip(self, other, strict=True)))


def flag(condition: npt.NDArray[np.bool_]) -> FloatArray:
    """Return 1 where the condition holds, else 0."""
    return condition.astype(np.float64)


def smooth_max(a: FloatArray, b: FloatArray) -> FloatArray:
    """Return (a⁴ + b⁴)^¼: two resources that overlap imperfectly near balance."""
    a2, b2 = a * a, b * b
    result: FloatArray = np.sqrt(np.sqrt(a2 * a2 + b2 * b2))
    return result


def alignment_rate(n: Number, k: Number, constants: Constants) -> FloatArray:
    """Return a product's rate by its row lengths: 1 for multiples of 8 elements (16 bytes).

    An odd length costs the whole `misaligned_slowdown`, one that is only even a third of it.
    """
    aligned = (np.mod(n, 8) == 0) & (np.mod(k, 8) == 0)
    even = (np.mod(n, 2) == 0) & (np.mod(k, 2) == 0)
    worst = np.where(aligned, 0.0, np.where(even, 0.33, 1.0))
    rate: FloatArray = 1.0 / (1.0 + worst * (constants.misaligned_slowdown - 1.0))
    return rate


def gemm_seconds(
    m: Number,
    n: Number,
    k: Number,
    machine: Machine,
    constants: Constants,
    *,
    batch: Number = 1.0,
    rate: Number = 1.0,
    element_bytes: float = ELEMENT_BYTES,
) -> FloatArray:
    """Return the seconds of `batch` products (m × k)·(k × n) in one kernel."""
    units = machine.compute_units
    per_unit = machine.peak * constants.gemm_efficiency * rate / units
    best: FloatArray = np.asarray(np.inf)
    for tile_m, tile_n, relative in TILES:
        waves = np.ceil(np.divide(m, tile_m)) * np.ceil(np.divide(n, tile_n)) * batch / units
        waves = waves + constants.wave_quantisation * (np.ceil(waves) - waves)
        best = np.minimum(best, waves * (2.0 * tile_m * tile_n / relative))
    # The fill of a tile as the depth k that would take as long.
    fill = constants.gemm_fill_s * (machine.peak / units) / (2.0 * TILES[0][0] * TILES[0][1])
    compute = best * (k + fill) / per_unit
    num_bytes = batch * element_bytes * (m * k + k * n + m * n)
    memory = num_bytes / (machine.memory_bandwidth * constants.hbm_efficiency)
    seconds: FloatArray = np.maximum(compute, memory) + constants.kernel_gap_s
    return seconds


def linear_seconds(
    tokens: Number,
    n: Number,
    k: Number,
    strategy: Strategy,
    machine: Machine,
    constants: Constants,
    *,
    batch: Number = 1.0,
    rate: Number = 1.0,
) -> Passes:
    """Return the passes of y = x·W, x: tokens × k, W: k × n; casts to FP8 or FP4 included."""
    cast: Number = 0.0
    if np.any(strategy.fp8 > 0):
        narrow = strategy.fp8 > 0
        speedup = np.where(strategy.fp8 > 1, constants.fp4_speedup, constants.fp8_speedup)
        rate = rate * np.where(narrow, speedup, 1.0)
        rowwise = np.where(strategy.fp8_rowwise > 0, constants.fp8_rowwise_factor, 1.0)
        bandwidth = machine.memory_bandwidth * constants.hbm_efficiency
        cast = np.where(narrow, constants.fp8_cast_bytes * rowwise, 0.0) * batch / bandwidth
    forward = gemm_seconds(tokens, n, k, machine, constants, batch=batch, rate=rate)
    by_input = gemm_seconds(tokens, k, n, machine, constants, batch=batch, rate=rate)
    by_weight = gemm_seconds(k, n, tokens, machine, constants, batch=batch, rate=rate)
    return Passes(forward + cast * (tokens * k + k * n), by_input + cast * (tokens * n), by_weight)


def memory_bound_seconds(
    num_bytes: Number, machine: Machine, constants: Constants, *, kernels: Number = 1.0
) -> FloatArray:
    """Return the seconds of kernels that move `num_bytes` in all."""
    bandwidth = machine.memory_bandwidth * constants.hbm_efficiency
    seconds: FloatArray = num_bytes / bandwidth + kernels * constants.kernel_gap_s
    return seconds


def flash_rate(head_dim: Number, machine: Machine, constants: Constants) -> FloatArray:
    """Return the FLOP/s of fused attention's forward pass, by the width of a head."""
    width, half = np.minimum(head_dim, 128.0), constants.flash_head_dim
    efficiency = constants.flash_efficiency * (1.0 + half / 128.0) * width / (width + half)
    rate: FloatArray = machine.peak * efficiency
    return rate


def fused_attention_seconds(
    shape: Shape, strategy: Strategy, machine: Machine, constants: Constants
) -> tuple[FloatArray, FloatArray]:
    """Return forward and backward of causal fused attention; tp splits heads, cp the work."""
    length = strategy.sequence_length
    reach = np.minimum(length, shape.window)
    pairs = 0.5 * reach * (reach + FLASH_BLOCK) + (length - reach) * reach
    pairs = pairs * strategy.sequences / strategy.cp
    d_v = np.where(machine.pads_heads > 0, np.maximum(shape.d_qk, shape.d_v), shape.d_v)
    flops = 2.0 * (shape.d_qk + d_v) * (shape.heads / strategy.tp) * pairs
    rate = flash_rate(shape.d_qk, machine, constants)
    forward = flops / rate + constants.kernel_gap_s
    backward = FLASH_BACKWARD_FLOPS * flops / (rate * constants.flash_backward_ratio)
    return forward, backward + 3.0 * constants.kernel_gap_s


def unfused_attention_seconds(
    shape: Shape, strategy: Strategy, machine: Machine, constants: Constants
) -> tuple[FloatArray, FloatArray]:
    """Return forward and backward of batched products over s × s scores, softmax and dropout."""
    batch = strategy.sequences * shape.heads / strategy.tp
    s, d = strategy.sequence_length, shape.d_qk
    queries = gemm_seconds(s, s, d, machine, constants, batch=batch)
    values = gemm_seconds(s, d, s, machine, constants, batch=batch)
    score_bytes = batch * s * s * ELEMENT_BYTES * constants.unfused_attention_scale
    forward_bytes = score_bytes * (2.0 + 2.5 * shape.dropout)
    backward_bytes = score_bytes * (3.0 + 2.5 * shape.dropout)
    forward = memory_bound_seconds(forward_bytes, machine, constants, kernels=2.0)
    backward = memory_bound_seconds(backward_bytes, machine, constants, kernels=2.0)
    return queries + values + forward, 2.0 * queries + 2.0 * values + backward


def attention_seconds(
    shape: Shape, strategy: Strategy, machine: Machine, constants: Constants
) -> tuple[FloatArray, FloatArray]:
    """Return forward and backward of attention, fused where the strategy says so."""
    flash = strategy.flash > 0
    if np.all(flash):
        return fused_attention_seconds(shape, strategy, machine, constants)
    plain = unfused_attention_seconds(shape, strategy, machine, constants)
    if not np.any(flash):
        return plain
    fused = fused_attention_seconds(shape, strategy, machine, constants)
    return np.where(flash, fused[0], plain[0]), np.where(flash, fused[1], plain[1])
