from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tutti.accelerator.key_runs import MOST_SLICES, followed, scattered
from tutti.accelerator.reference.attention import attention
from tutti.accelerator.segments import Segments


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Segments, int]:
    """Runs of queries on runs of keys that overlap, leave gaps and come in any order."""
    across = draw(st.booleans())
    queries, keys, starts = [], [], []
    for _ in range(draw(st.integers(1, 5))):
        own = draw(st.integers(1, 6))
        queries.append(own)
        keys.append(draw(st.integers(1 if across else own, 12)))
        starts.append(draw(st.integers(0, 20)))
    num_keys = max(s + n for s, n in zip(starts, keys, strict=True)) + draw(st.integers(0, 3))
    return Segments(tuple(queries), tuple(keys), tuple(starts), across=across), num_keys


@given(drawn())
def test_keys_laid_out_anew_are_attended_alike(case: tuple[Segments, int]) -> None:
    segments, num_keys = case
    numbers = torch.Generator().manual_seed(num_keys)

    def some(rows: int, heads: int) -> torch.Tensor:
        made = torch.randn(rows, heads, 8, generator=numbers, dtype=torch.float64)
        return made.requires_grad_()

    q, k, v = some(segments.num_queries, 4), some(num_keys, 2), some(num_keys, 2)
    options = {"scale": 0.3, "causal": not segments.across}
    wanted = attention(q, k, v, segments, **options)
    other_k, other_v, again = followed(k, v, segments)
    assert again.keys_follow
    assert other_k.shape[0] == sum(again.keys)
    got = attention(q, other_k, other_v, again, **options)
    torch.testing.assert_close(got, wanted)
    towards = torch.randn(got.shape, generator=numbers, dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad(got, (q, k, v), towards),
        torch.autograd.grad(wanted, (q, k, v), towards),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_keys_in_order_are_left_alone() -> None:
    segments = Segments.of_lengths((3, 4))
    k, v = torch.zeros(7, 1, 8), torch.zeros(7, 1, 8)
    assert followed(k, v, segments) == (k, v, segments)


def test_many_slices_are_refused_with_their_number() -> None:
    count = MOST_SLICES + 1
    starts = tuple(range(0, 2 * count, 2))
    assert scattered(Segments((1,) * count, (1,) * count, starts)) is not None
    assert scattered(Segments((1,) * 3, (1,) * 3, (0, 2, 4))) is None
