"""Attention over rows that ranks share, with keys and values that travel around.

Each rank attends to the keys it holds, then passes them on, cp times; partial results are merged by
their log-sum-exp. Which of a rank's queries see which of another's keys is known beforehand
(`ring_steps`): of a document, all keys of earlier chunks. They lie side by side on the rank they
come from, for a document that reaches from its early chunk into its late one ends the first and
begins the second. Only one piece of keys is held at a time, where gathering holds all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tutti.accelerator.host_to_device import moved
from tutti.accelerator.operators import Operators
from tutti.accelerator.segments import Segments
from tutti.models import AttentionSpec
from tutti.nn.parallel.collectives import exchange
from tutti.nn.parallel.groups import Group
from tutti.nn.parallel.rows import RowPiece


class RingStep(NamedTuple):
    """What a rank sees of the keys that are with it after so many steps."""

    segments: Segments | None  # None: nothing
    queries_t: Tensor | None  # which of its tokens do; None: all, in order


def fits_ring(spec: AttentionSpec) -> bool:
    """Tell whether attention is plain enough to be merged from parts."""
    return spec.window is None and spec.soft_cap is None and not spec.sinks and spec.alibi is None


def ring_steps(
    pieces: Sequence[Sequence[RowPiece]], rank: int, device: torch.device
) -> tuple[RingStep, ...]:
    """Return what a rank does in each step, its own keys first; `pieces` are those of all ranks."""
    ways = len(pieces)
    return tuple(
        _step(pieces[rank], pieces[(rank - step) % ways], device, own=step == 0)
        for step in range(ways)
    )


def _step(
    own_pieces: Sequence[RowPiece],
    key_pieces: Sequence[RowPiece],
    device: torch.device,
    *,
    own: bool,
) -> RingStep:
    places: dict[
        int, list[tuple[RowPiece, int]]
    ] = {}  # document → its pieces, with their first row
    row = 0
    for piece in key_pieces:
        places.setdefault(piece.document, []).append((piece, row))
        row += piece.size
    runs: list[tuple[int, int, int]] = []  # queries, keys, first key
    seeing: list[Tensor] = []
    row = 0
    for piece in own_pieces:
        before = [
            (keys.size, at)
            for keys, at in places.get(piece.document, ())
            if keys.first < piece.first or (own and keys.first == piece.first)
        ]
        if before:
            run = (piece.size, sum(size for size, _ in before), before[0][1])
            _append(runs, run, own=own)
            seeing.append(torch.arange(row, row + piece.size))
        row += piece.size
    if not runs:
        return RingStep(None, None)
    queries, keys, starts = zip(*runs, strict=True)
    everyone = len(seeing) == len(own_pieces)
    chosen = None if everyone else moved(torch.cat(seeing), device)
    return RingStep(Segments(queries, keys, starts, across=not own), chosen)


def _append(runs: list[tuple[int, int, int]], run: tuple[int, int, int], *, own: bool) -> None:
    """Add what a piece sees, as one run with the piece before where they see keys in common.

    Of its own keys a later piece of a document sees those of the earlier one and then its own: both
    are one causal run. Of another rank's keys they are one if they see the same. Kernels take keys
    that no two runs have in common.
    """
    queries, keys, start = run
    if runs and runs[-1][2] == start:
        earlier = runs[-1]
        if earlier[1] == keys - (queries if own else 0):
            runs[-1] = (earlier[0] + queries, keys, start)
            return
    runs.append(run)


def ring_attention(
    q_thd: Tensor,
    k_tgd: Tensor,
    v_tge: Tensor,
    steps: Sequence[RingStep],
    key_rows: Sequence[int],
    *,
    scale: float,
    group: Group,
    operators: Operators,
) -> Tensor:
    """Return (T, H, E) of this rank's tokens; `key_rows` are the rows of keys of each rank."""
    own = steps[0].segments
    assert own is not None, "a rank has tokens"
    y_the, lse_th = operators.attention_with_lse(q_thd, k_tgd, v_tge, own, scale=scale)
    for number, (segments, queries_t) in enumerate(steps[1:], start=1):
        k_tgd, v_tge = _passed_on(k_tgd, v_tge, group, key_rows[(group.rank - number) % group.size])
        if segments is None:
            continue
        seeing = q_thd if queries_t is None else q_thd[queries_t]
        y, lse = operators.attention_with_lse(
            seeing, k_tgd, v_tge, segments, scale=scale, causal=False
        )
        if queries_t is not None:
            y = torch.zeros_like(y_the).index_copy(0, queries_t, y)
            lse = torch.full_like(lse_th, float("-inf")).index_copy(0, queries_t, lse)
        y_the, lse_th = _merged((y_the, lse_th), (y, lse))
    if steps[-1].segments is None:
        y_the = _Joined.apply(y_the, k_tgd, v_tge)
    return y_the


class _Joined(torch.autograd.Function):
    """Lets backward pass through keys that nobody here saw: the other ranks wait for it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.shapes = k.shape, v.shape
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k_shape, v_shape = ctx.shapes
        gradient = gradients[0]
        return gradient, gradient.new_zeros(k_shape), gradient.new_zeros(v_shape)


def _passed_on(k_tgd: Tensor, v_tge: Tensor, group: Group, arriving: int) -> tuple[Tensor, Tensor]:
    """Give the keys and values at hand to the next rank; return those of the one before."""
    rows, size, rank = k_tgd.shape[0], group.size, group.rank
    send = [rows if peer == (rank + 1) % size else 0 for peer in range(size)]
    receive = [arriving if peer == (rank - 1) % size else 0 for peer in range(size)]
    widths = [k_tgd[0].numel(), v_tge[0].numel()]
    both = torch.cat((k_tgd.flatten(1), v_tge.flatten(1)), dim=1)
    k, v = exchange(both, group, send, receive).split(widths, dim=1)
    return k.unflatten(1, k_tgd.shape[1:]), v.unflatten(1, v_tge.shape[1:])


def _merged(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return attention over the keys of both parts."""
    lse_th = torch.logaddexp(a[1], b[1])
    share_a, share_b = ((part[1] - lse_th).exp().unsqueeze(-1) for part in (a, b))
    return a[0] * share_a.to(a[0].dtype) + b[0] * share_b.to(b[0].dtype), lse_th
