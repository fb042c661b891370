"""Attention over a sequence that ranks share, with keys and values that travel around.

Each rank attends to the keys it holds, then passes them on, cp times; partial results are merged by
their log-sum-exp. A rank holds chunks r and 2·cp − 1 − r of every sequence, so of the keys of
another rank s either both of its chunks see the first half (s < r), or its late chunk sees all.
Only one piece of keys is held at a time, where gathering holds all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from tutti.accelerator.operators import Operators
from tutti.accelerator.segments import Segments
from tutti.errors import InputError
from tutti.models import AttentionSpec
from tutti.nn.collectives import exchange
from tutti.nn.parallel import Group


def fits_ring(spec: AttentionSpec) -> bool:
    """Tell whether attention is plain enough to be merged from parts."""
    return spec.window is None and spec.soft_cap is None and not spec.sinks and spec.alibi is None


def ring_attention(
    q_thd: Tensor,
    k_tgd: Tensor,
    v_tge: Tensor,
    lengths: Sequence[int],
    *,
    scale: float,
    group: Group,
    operators: Operators,
) -> Tensor:
    """Return (T, H, E) of this rank's tokens, over whole sequences of these lengths."""
    chunks = _chunk_lengths(lengths, group.size)
    starts = [2 * start for start in itertools.accumulate(chunks[:-1], initial=0)]
    y_the, lse_th = operators.attention_with_lse(
        q_thd, k_tgd, v_tge, _own(chunks, starts), scale=scale
    )
    late_t = torch.cat(
        [torch.arange(s + c, s + 2 * c) for s, c in zip(starts, chunks, strict=True)]
    ).to(q_thd.device)
    for step in range(1, group.size):
        k_tgd, v_tge = _passed_on(k_tgd, v_tge, group)
        if (group.rank - step) % group.size < group.rank:
            part = operators.attention_with_lse(
                q_thd, k_tgd, v_tge, _both_see_first(chunks, starts), scale=scale, causal=False
            )
        else:
            y, lse = operators.attention_with_lse(
                q_thd[late_t], k_tgd, v_tge, _late_sees_all(chunks, starts), scale=scale,
                causal=False,
            )  # fmt: skip
            part = (
                torch.zeros_like(y_the).index_copy(0, late_t, y),
                torch.full_like(lse_th, float("-inf")).index_copy(0, late_t, lse),
            )
        y_the, lse_th = _merged((y_the, lse_th), part)
    return y_the


def _chunk_lengths(lengths: Sequence[int], ways: int) -> list[int]:
    for length in lengths:
        if length % (2 * ways):
            raise InputError(
                f"ring attention over {ways} ranks: a sequence of {length} tokens does not split "
                f"into {2 * ways} equal chunks; pad it, or gather the keys"
            )
    return [length // (2 * ways) for length in lengths]


def _own(chunks: Sequence[int], starts: Sequence[int]) -> Segments:
    """Return each chunk on itself and, of the late one, on the early one."""
    each = list(zip(chunks, starts, strict=True))
    return Segments(
        tuple(c for c, _ in each for _ in range(2)),
        tuple(keys for c, _ in each for keys in (c, 2 * c)),
        tuple(s for _, s in each for _ in range(2)),
    )


def _both_see_first(chunks: Sequence[int], starts: Sequence[int]) -> Segments:
    each = [(c, s) for c, s in zip(chunks, starts, strict=True) for _ in range(2)]
    sizes = tuple(c for c, _ in each)
    return Segments(sizes, sizes, tuple(s for _, s in each))


def _late_sees_all(chunks: Sequence[int], starts: Sequence[int]) -> Segments:
    return Segments(tuple(chunks), tuple(2 * c for c in chunks), tuple(starts))


def _passed_on(k_tgd: Tensor, v_tge: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Give the keys and values at hand to the next rank; return those of the one before."""
    rows, size, rank = k_tgd.shape[0], group.size, group.rank
    send = [rows if peer == (rank + 1) % size else 0 for peer in range(size)]
    receive = [rows if peer == (rank - 1) % size else 0 for peer in range(size)]
    widths = [k_tgd[0].numel(), v_tge[0].numel()]
    both = torch.cat((k_tgd.flatten(1), v_tge.flatten(1)), dim=1)
    k, v = exchange(both, group, send, receive).split(widths, dim=1)
    return k.reshape(k_tgd.shape), v.reshape(v_tge.shape)


def _merged(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return attention over the keys of both parts."""
    lse_th = torch.logaddexp(a[1], b[1])
    share_a, share_b = ((part[1] - lse_th).exp().unsqueeze(-1) for part in (a, b))
    return a[0] * share_a.to(a[0].dtype) + b[0] * share_b.to(b[0].dtype), lse_th
