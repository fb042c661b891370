"""Rows of tokens before keys in pages, and random choices that nothing but their key decides."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from scipy import stats  # noqa: E402

from tutti.accelerator import PagedSegments, paged  # noqa: E402
from tutti.accelerator.operators import Operators  # noqa: E402
from tutti.accelerator.reference.paged import paged_attention as reference_attention  # noqa: E402
from tutti.accelerator.reference.sampling import allowed, sample, uniform  # noqa: E402

ROWS = PagedSegments.of((1, 3, 2), (5, 3, 9), [[7, 2], [4], [1, 3, 6]], 4)


def test_positions_and_places_are_found_on_the_device() -> None:
    row_t, position_t = ROWS.rows_and_positions()
    assert row_t.tolist() == [0, 1, 1, 1, 2, 2]
    assert position_t.tolist() == [4, 0, 1, 2, 7, 8]
    assert ROWS.places(row_t, position_t).tolist() == [8, 16, 17, 18, 15, 24]


def test_padding_belongs_to_page_0() -> None:
    from dataclasses import replace

    padded = replace(ROWS, num_queries=8)
    row_t, position_t = padded.rows_and_positions()
    assert row_t.tolist()[6:] == [0, 0]
    assert position_t.tolist()[6:] == [-1, -1]
    assert padded.places(row_t, position_t).tolist()[6:] == [0, 0]


def test_keys_that_were_stored_are_the_ones_attended_to() -> None:
    operators = Operators("cpu", forced={})
    torch.manual_seed(0)
    k, v, q = (torch.randn(6, 2, 8) for _ in range(3))
    keys, values = torch.full((8, 4, 2, 8), torch.nan), torch.full((8, 4, 2, 8), torch.nan)
    whole = PagedSegments.of((6,), (6,), [[5, 2]], 4)
    operators.store_pages(k, v, keys, values, whole.places(*whole.rows_and_positions()))
    found = operators.paged_attention(q, keys, values, whole, scale=0.3)
    one = PagedSegments.of((1,), (4,), [[5, 2]], 4)
    again = operators.paged_attention(q[3:4], keys, values, one, scale=0.3)
    torch.testing.assert_close(again[0], found[3])
    assert torch.isfinite(found).all(), "places that nobody wrote to are not looked at"


@pytest.mark.parametrize(("heads", "window"), [(2, None), (6, 5), (8, None)])
def test_pages_of_bfloat16_are_read_as_they_are_and_rounded_once(
    heads: int, window: int | None
) -> None:
    torch.manual_seed(0)
    q, keys, values = (
        torch.randn(size).bfloat16() for size in ((3, heads, 8), *[(9, 4, 2, 8)] * 2)
    )
    rows = PagedSegments.of((1, 1, 1), (5, 3, 14), [[7, 2], [4], [1, 3, 6, 8]], 4)
    found = paged.paged_attention(q, keys, values, rows, scale=0.3, window=window)
    assert paged.compiles(q, keys, values, rounded=False)
    wide = (q.double(), keys.double(), values.double())
    expected = reference_attention(*wide, rows, scale=0.3, window=window)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-5)


def columns(rows: int, **values: float) -> dict[str, torch.Tensor]:
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **values}
    return {
        "seeds": torch.arange(rows),
        "positions": torch.full((rows,), 17),
        **{name: torch.full((rows,), value) for name, value in given.items()},
    }


def test_draws_follow_the_softmax_of_scaled_logits() -> None:
    rows = 40_000
    logits = torch.tensor([1.5, 0.0, -1.0, 2.0, -8.0, 0.5])
    drawn = sample(logits.expand(rows, -1), **columns(rows, temperature=1.7))
    expected = torch.softmax(logits / 1.7, 0).double()
    counts = torch.bincount(drawn, minlength=6)
    assert stats.chisquare(counts, expected / expected.sum() * rows).pvalue > 0.01


def test_positions_of_one_seed_are_as_good_as_seeds() -> None:
    rows = 40_000
    own = {**columns(rows), "seeds": torch.full((rows,), 5), "positions": torch.arange(rows)}
    logits = torch.tensor([0.3, 0.2, 0.1, 0.0])
    counts = torch.bincount(sample(logits.expand(rows, -1), **own), minlength=4)
    expected = torch.softmax(logits, 0).double()
    assert stats.chisquare(counts, expected / expected.sum() * rows).pvalue > 0.01


def test_neither_neighbours_nor_order_change_a_draw() -> None:
    logits = torch.randn(50, 90, generator=torch.Generator().manual_seed(1))
    own = {**columns(50), "positions": torch.arange(50)}
    together = sample(logits, **own)
    order = torch.randperm(50)
    mixed = sample(logits[order], **{name: column[order] for name, column in own.items()})
    assert torch.equal(mixed, together[order])
    alone = sample(logits[7:8], **{name: column[7:8] for name, column in own.items()})
    assert alone.item() == together[7].item()


def test_uniform_numbers_are_uniform_along_every_axis() -> None:
    numbers = uniform(torch.arange(100), torch.arange(100), torch.arange(1000))
    assert stats.kstest(numbers.flatten().numpy(), "uniform").pvalue > 0.01
    assert float(numbers.min()) > 0
    assert float(numbers.max()) < 1
    steps = (numbers[:, 1:] - 0.5) * (numbers[:, :-1] - 0.5)
    assert abs(float(steps.mean())) < 5 / 12 / 100_000**0.5, "neighbours do not hang together"


def test_which_tokens_may_be_drawn() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]]))

    def kept(k: int = 0, p: float = 1.0, m: float = 0.0) -> list[int]:
        one = (torch.tensor([k]), torch.tensor([p]), torch.tensor([m]))
        return allowed(logits, *one)[0].nonzero().flatten().tolist()

    assert kept() == [0, 1, 2, 3]
    assert kept(k=2) == [1, 3]
    assert kept(p=0.6) == [1, 3], "0.4 is too little"
    assert kept(p=0.0) == [1], "the likeliest stays"
    assert kept(m=0.45) == [1, 2, 3]
    assert kept(k=3, p=0.7) == [1, 3], "of the three likeliest, 0.4 and 0.3 of 0.9 have 0.78"
