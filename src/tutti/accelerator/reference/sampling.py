"""The choice of a token, with random numbers that nothing but (seed, position) decides.

A token is drawn by adding Gumbel noise to scaled logits and taking the largest. The noise of a
token of the vocabulary is a hash of the row's seed, its position and the token's number: neither
the batch nor the order of work nor the chip changes it, and ranks that hold parts of a vocabulary
draw the same as one that holds all of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 2⁶⁴ ÷ golden ratio, as a signed number
_FIRST, _SECOND = -4658895280553007687, -7723592293110705685  # Stafford's mix 13, as splitmix64 has


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right as if the numbers had no sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mixed(x: Tensor) -> Tensor:
    """Return a hash of 64-bit numbers (splitmix64's)."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def uniform(seeds_s: Tensor, positions_s: Tensor, numbers: Tensor) -> Tensor:
    """Return numbers in (0, 1), float32, of rows and of numbers of tokens (V,) or (S, V)."""
    row_s = mixed(mixed(seeds_s.long() + _GOLDEN) ^ positions_s.long() * _GOLDEN)
    bits = _shifted(mixed(row_s.unsqueeze(1) + (numbers.long() + 1) * _GOLDEN), 41)  # 23 bits
    return (bits.float() + 0.5) * 2.0**-23


def gumbel(seeds_s: Tensor, positions_s: Tensor, numbers: Tensor) -> Tensor:
    """Return the noise whose largest sum with logits is a draw from their softmax."""
    return -torch.log(-torch.log(uniform(seeds_s, positions_s, numbers)))


def allowed(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return which tokens may be drawn.

    The k likeliest (0: all); of them the fewest that have p of the probability; of them those that
    are at least min-p times as likely as the likeliest.
    """
    sorted_, order = scaled.sort(dim=-1, descending=True, stable=True)
    place = torch.arange(scaled.shape[-1], device=scaled.device)
    kept = (top_k.unsqueeze(1) <= 0) | (place < top_k.unsqueeze(1))
    likely = torch.softmax(sorted_.masked_fill(~kept, float("-inf")), dim=-1)
    before = likely.cumsum(-1) - likely
    all_of_it = top_p.unsqueeze(1) >= 1  # a sum may round to 1 before the last
    kept &= (before < top_p.unsqueeze(1)) | all_of_it | (place == 0)
    kept &= likely >= min_p.unsqueeze(1) * likely[:, :1]
    return torch.zeros_like(kept).scatter(1, order, kept)


def sample(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    draws: bool = True,
    cuts: bool = True,
) -> Tensor:
    """Return a token of each row of logits (S, V); a temperature of 0 takes the likeliest.

    `draws`, `cuts`: whether any row has a temperature; a limit of which tokens may be drawn.
    """
    best = logits.argmax(-1)
    if not draws:
        return best
    wide = torch.promote_types(logits.dtype, torch.float32)
    hot = temperature > 0
    scaled = logits.to(wide) / torch.where(hot, temperature, 1.0).unsqueeze(1).to(wide)
    if cuts:
        scaled = scaled.masked_fill(~allowed(scaled, top_k, top_p, min_p), float("-inf"))
    numbers = torch.arange(logits.shape[1], device=logits.device)
    noise = gumbel(seeds, positions, numbers).to(wide)
    return torch.where(hot, (scaled + noise).argmax(-1), best)
