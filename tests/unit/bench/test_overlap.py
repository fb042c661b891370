"""What `tutti bench overlap` counts: the collectives of a block, and what may run beside them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support.threads import ThreadLinks, World
from tutti.accelerator.operators import Operators
from tutti.bench.overlap import OverlapRow, OverlapRun, Question
from tutti.bench.overlap_price import Pair, Pricing, could_hide
from tutti.bench.timed_products import Clocked, SilentProducts, TimedOperators
from tutti.cli.bench.overlap import numbers
from tutti.cost.arrays import Shape
from tutti.errors import InputError
from tutti.hardware.profile import LinkFigure

LINK = LinkFigure(kind="comm rail", latency_s=1e-4, bandwidth=12.5e6)


def pricing_of(question: Question) -> Pricing:
    return Pricing.of(
        question.subject,
        Shape.of(question.spec(), 0),
        ranks=question.ranks,
        tokens=question.tokens,
        link=LINK,
        balance=1.0,
    )


def question_of(subject: Any) -> Question:
    return Question(ranks=2, subject=subject, tokens=100, hidden=128)


@pytest.mark.parametrize(
    ("subject", "chunks"), [("products", 1), ("products", 2), ("products", 4), ("experts", 1)]
)
def test_a_block_runs_the_collectives_that_are_priced(subject: Any, chunks: int) -> None:
    question = question_of(subject)

    def one(links: ThreadLinks) -> tuple[list[float], Any, Any]:
        operators = TimedOperators(Operators("cpu"), lambda m, n, k: 0.0)
        clocked = Clocked(links.group(range(2)))
        y, gradient = OverlapRun(question, clocked, chunks, operators)()
        silent = OverlapRun(question, SilentProducts(clocked), chunks, operators)
        assert [part.shape for part in silent()] == [y.shape, gradient.shape]
        return clocked.seconds, y, gradient

    for seconds, y, gradient in World(2).run(one):
        assert y.shape == gradient.shape
        pairs = pricing_of(question).pairs(chunks)
        assert sum(pair.collectives for pair in pairs) == len(seconds)
        assert could_hide(seconds, pairs) <= sum(seconds)


def test_every_product_of_a_block_takes_its_declared_time() -> None:
    """All products are seen, whole or in pieces: the same operations, however they are cut."""
    question = question_of("products")

    def one(links: ThreadLinks) -> list[int]:
        found = []
        for chunks in (1, 4):
            flops: list[int] = []
            operators = TimedOperators(
                Operators("cpu"), lambda m, n, k, flops=flops: float(flops.append(m * n * k) or 0)
            )
            OverlapRun(question, links.group(range(2)), chunks, operators)()
            found.append(sum(flops))
        return found

    hidden, ffn = 128, 352
    per_token = 3 * hidden * hidden + hidden * hidden + 3 * hidden * ffn
    for whole, pieces in World(2).run(one):
        assert whole == pieces == 3 * 100 * per_token // 2


def test_real_products_are_those_in_turn_and_as_whole() -> None:
    question = question_of("products")

    def one(links: ThreadLinks) -> list[Any]:
        found = []
        for chunks in (1, 4):
            run = OverlapRun(question, links.group(range(2)), chunks, Operators("cpu"))
            found.append([*run(), *run.gradients()])
            assert not run.gradients()
        return found

    for whole, pieces in World(2).run(one):
        for one_, other in zip(whole, pieces, strict=True):
            error = (one_.float() - other.float()).norm() / one_.float().norm()
            assert error < 0.02, "bfloat16"


def test_the_shorter_of_each_pair_can_hide() -> None:
    pairs = [Pair(2, 1.0), Pair(1, math.inf), Pair(1, 0.0)]
    assert could_hide([3.0, 4.0, 5.0, 6.0], pairs) == 1.0 + 5.0
    with pytest.raises(RuntimeError, match="3 collectives"):
        could_hide([1.0, 2.0, 3.0], pairs)


@pytest.mark.parametrize("subject", ["products", "experts"])
def test_the_chip_is_as_fast_as_asked(subject: Any) -> None:
    pricing = pricing_of(question_of(subject))
    beside = sum(p.beside_s for p in pricing.pairs(1) if p.collectives and p.beside_s < math.inf)
    whole = pricing._collectives_s()
    assert beside == pytest.approx(whole, rel=1e-6)
    assert 0 < pricing.exposed_s(4) <= whole


def test_a_row_tells_what_was_hidden() -> None:
    row = OverlapRow(
        ranks=2, subject="products", chunks=4, step_s=1.2, in_turn_s=2.0, compute_s=1.0,
        communication_s=1.0, could_hide_s=0.9, priced_exposed_s=0.25, overrun=0.0,
    )  # fmt: skip
    assert row.exposed_s == pytest.approx(0.2)
    assert row.hidden_s == pytest.approx(0.8)
    assert row.hidden_share == pytest.approx(0.8 / 0.9)


def test_numbers() -> None:
    assert numbers("1, 2,8", "--chunks") == (1, 2, 8)
    with pytest.raises(InputError, match="--ranks: '1'"):
        numbers("1,2", "--ranks", smallest=2)


def test_zeros_have_the_dtype_of_the_products() -> None:
    operators = TimedOperators(Operators("cpu"), lambda m, n, k: 0.0)
    y = operators.linear(torch.ones(3, 4, dtype=torch.bfloat16), torch.ones(5, 4))
    assert y.shape == (3, 5)
    assert y.dtype is torch.bfloat16
