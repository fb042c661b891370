"""The loop over candidates: every part of the space gets a plan that fits, within the budget."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tests.unit.search.test_planner import problem
from tutti.search.candidate_loop import Search
from tutti.search.pricing.unit_tables import Tables
from tutti.search.question.effort import Effort
from tutti.search.strategy.candidate import NARROWER, Candidate


@cache
def tables() -> Tables:
    return Tables(problem())


@cache
def candidates() -> list[Candidate]:
    return sorted(Search(tables(), Effort()).source.all(), key=lambda one: one.value)


@pytest.fixture
def search() -> Search:
    found = Search(tables(), Effort(), bound=1e-6)
    tried = (found.simulator.parts(one.parts) for one in candidates())
    simulated = next(one for one in tried if one is not None)
    found.ranked.take(replace(simulated, value=simulated.seconds, key="known"))
    return found


def likely(search: Search) -> list[Candidate]:
    """Return candidates of one part that promise enough, best first."""
    best = search.ranked.best
    assert best is not None
    inside = NARROWER[2]
    chosen = [one for one in candidates() if inside(one.chains)][:4]
    return [replace(one, value=best.value * (1.0 + 0.01 * i)) for i, one in enumerate(chosen)]


def run(search: Search, left: list[Candidate], fits: Any, budget: int = 10**9) -> list[int]:
    """Narrow with a simulator that finds room for some; return which were tried."""
    tried: list[int] = []
    parts = [one.parts for one in left]
    real = search.simulator.parts

    def simulated(asked: Any) -> Any:
        tried.append(parts.index(asked))
        search.simulator.instructions += 10
        return real(asked) if fits(tried[-1]) else None

    search.simulator.parts = simulated  # type: ignore[method-assign]
    search._narrow(left, budget)
    return tried


def test_a_part_whose_best_candidate_does_not_fit_tries_the_next(search: Search) -> None:
    left = likely(search)
    kept = list(left)
    tried = run(search, left, fits=lambda number: number >= 2)
    assert tried[:3] == [0, 1, 2]
    assert search.ranked.rejected == 2
    assert kept[0] not in search.looked_at
    assert kept[2] in search.looked_at


def test_what_fits_nowhere_is_tried_once_and_within_the_budget(search: Search) -> None:
    left = likely(search)
    spent = search.simulator.instructions
    assert run(search, left, fits=lambda _: False, budget=spent + 15) == [0, 1]
    assert len(left) == 2
