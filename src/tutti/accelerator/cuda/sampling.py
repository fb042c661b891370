"""The choice of a token in one pass over the logits: scaled, with its noise, the largest.

Several programs share a row where there are few; the last of them to come compares what all found.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tutti.accelerator.cuda.common import power_of_two, reason_against, zero_counters
from tutti.accelerator.registry import Implementation

BLOCK, WARPS = 4096, 8
PROGRAMS = 264  # keep a chip of 132 units busy
MOST_PARTS = 32  # of a row


@triton.jit
def _mixed(x):
    """Return a hash of 64-bit numbers, the reference's."""
    x = (x ^ (x >> 30)) * 13787848793156543929
    x = (x ^ (x >> 27)) * 10723151780598845931
    return x ^ (x >> 31)


@triton.jit
def _gumbel(seed, position, token):
    """Return the noise of tokens at a position: the reference's."""
    golden = tl.full((), 11400714819323198485, tl.uint64)
    row = _mixed(_mixed(seed + golden) ^ (position * golden))
    bits = _mixed(row + (token.to(tl.uint64) + 1) * golden) >> 41
    chance = (bits.to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(chance))


@triton.jit
def _best(value, token):
    """Return the largest value and the first token that has it."""
    most = tl.max(value, axis=0)
    return most, tl.min(tl.where(value == most, token, 2147483647), axis=0)


@triton.jit(do_not_specialize=["vocab", "each"])
def _choose(
    logits, temperatures, seeds, positions, values, tokens, counters, chosen, logits_row, vocab,
    each,
    DRAWS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    hot = False
    temperature, seed, position = 1.0, 0, 0
    if DRAWS:
        temperature = tl.load(temperatures + row)
        hot = temperature > 0
        temperature = tl.where(hot, temperature, 1.0)
        seed = tl.load(seeds + row).to(tl.uint64)
        position = tl.load(positions + row).to(tl.uint64)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)  # of each lane: one search at the end
    place = tl.full((BLOCK,), 2147483647, tl.int32)
    last = tl.minimum(vocab, (part + 1) * each)
    for first in range(part * each, last, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = tl.load(logits + row.to(tl.int64) * logits_row + token, mask=token < last,
                    other=float("-inf")).to(tl.float32)  # fmt: skip
        if DRAWS:  # noqa: SIM102  (known when the kernel is compiled; the next is not)
            if hot:
                x = tl.div_rn(x, temperature) + _gumbel(seed, position, token)
        x = tl.where(x == x, x, float("inf"))  # what is no number is chosen, and seen afterwards
        better = (x > best) & (token < last)
        place = tl.where(better, token, place)
        best = tl.where(better, x, best)
    high, at = _best(best, place)
    at = tl.minimum(at, vocab - 1)
    if PARTS > 1:
        tl.store(values + row * PARTS + part, high)
        tl.store(tokens + row * PARTS + part, at)
        tl.debug_barrier()
        if tl.atomic_add(counters + row, 1, sem="acq_rel") != PARTS - 1:
            return
        tl.store(counters + row, 0)  # as the next call wants to find it
        other = tl.arange(0, PARTS)
        value = tl.load(values + row * PARTS + other, cache_modifier=".cg")
        number = tl.load(tokens + row * PARTS + other, cache_modifier=".cg")
        high, at = _best(value, number)
    tl.store(chosen + row, at.to(tl.int64))


def sample(
    logits: Tensor,
    *,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    draws: bool = True,
    **_cuts: Any,
) -> Tensor:
    """Return a token of each row, as the reference does."""
    rows, vocab = logits.shape
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device)
    parts = min(MOST_PARTS, power_of_two(-(-PROGRAMS // rows)), power_of_two(-(-vocab // BLOCK)))
    each = -(-vocab // (parts * BLOCK)) * BLOCK
    values = logits.new_empty((rows, parts), dtype=torch.float32)
    tokens = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    _choose[(rows, parts)](
        logits, temperature.contiguous(), seeds.contiguous(), positions.contiguous(), values,
        tokens, zero_counters(logits.device, rows), chosen, logits.stride(0), vocab, each,
        DRAWS=draws, PARTS=parts, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return chosen


def _reason(logits: Tensor, *, cuts: bool = True, **_options: Any) -> str | None:
    if cuts:
        return "limits of which tokens may be drawn"
    return reason_against(logits)


IMPLEMENTATIONS = (
    Implementation(
        operator="sample",
        name="triton",
        function=sample,
        devices=("cuda",),
        supports=_reason,
        rank=20,
        exact=False,
        needs="triton",
    ),
)
