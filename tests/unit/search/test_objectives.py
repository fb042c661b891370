"""Cost and energy as objectives: bound, gap, rivals and words are of what was asked for."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from tests.support.searches import Case, small_case
from tutti.report.planning import planning_page
from tutti.search.answer.explain import explain, render
from tutti.search.answer.result import Objective
from tutti.search.pricing.money_and_energy import energy_text, spending_of

PRICES = {"a800": 2.0, "v100": 0.5}


def asked(objective: Objective) -> Case:
    """Return the small case with prices, as if it had been searched for an objective."""
    case = small_case()
    pools = tuple(replace(p, price_per_chip_hour=PRICES[p.name]) for p in case.cluster.pools)
    cluster = replace(case.cluster, pools=pools, currency="CNY")
    best = case.result.best
    spent = spending_of(best.plan, best.step_seconds, cluster)
    value = spent.cost if objective is Objective.COST else spent.joules
    assert value is not None
    bound = value / 1.25
    if objective is Objective.STEP_TIME:
        value, bound = best.step_seconds, case.result.lower_bound_seconds
    result = replace(
        case.result, objective=objective, value=value, value_bound=bound, spending=spent
    )
    return replace(case, result=result, cluster=cluster)


def test_spending_is_what_the_chips_that_take_part_cost():
    case = asked(Objective.COST)
    best, spent = case.result.best, case.result.spending
    hour = 8 * 2.0 + 8 * 0.5
    assert spent.cost == pytest.approx(best.step_seconds * hour / 3600.0)
    watts = sum(pool.num_chips * pool.chip_watts for pool in case.cluster.pools)
    assert spent.joules == pytest.approx(best.step_seconds * watts)
    tokens = 512 * 4096
    assert spent.cost_per_million_tokens == pytest.approx(spent.cost / tokens * 1e6)
    assert spent.tokens_per_joule == pytest.approx(tokens / spent.joules)
    unknown = replace(
        case.cluster,
        pools=tuple(replace(p, price_per_chip_hour=None) for p in case.cluster.pools),
    )
    silent = spending_of(best.plan, best.step_seconds, unknown)
    assert silent.cost is None
    assert "costs" not in silent.words


@pytest.mark.parametrize(
    ("objective", "beaten", "worse"),
    [
        (Objective.COST, "costs less than {} CNY per step", "costs at most 25.00 % more than"),
        (Objective.ENERGY, "takes less than {} per step", "takes at most 25.00 % more than"),
    ],
)
def test_bound_gap_and_words_are_of_the_objective(objective, beaten, worse):
    case = asked(objective)
    assert case.result.gap_pct == pytest.approx(25.0)
    found = explain(case.result, case.model, case.cluster)
    bound = case.result.value_bound
    said = f"{bound:,.4g}" if objective is Objective.COST else energy_text(bound)
    assert beaten.format(said) in found.bound
    assert worse in found.bound
    assert "faster" not in found.bound
    own, last = found.compared[0], found.compared[-1]
    assert own.amount == pytest.approx(case.result.value)
    assert (last.name, last.amount) == ("lower bound", bound)
    assert last.ratio == pytest.approx(0.8)
    document = case.result.to_document()
    assert document["gap_pct"] == pytest.approx(25.0)
    assert document["value_unit"] == (
        "CNY per step" if objective is Objective.COST else "J per step"
    )
    unproven = replace(case.result, value_bound=0.0)
    assert explain(unproven, case.model, case.cluster).gap_pct is None


@pytest.mark.parametrize("objective", list(Objective))
def test_cost_and_energy_stand_on_terminal_page_and_in_json(objective):
    case = asked(objective)
    spent = case.result.spending
    console = Console(width=100, file=io.StringIO(), force_terminal=False)
    console.print(render(explain(case.result, case.model, case.cluster)))
    text = re.sub(r"\s+", " ", console.file.getvalue())
    cost = f"{spent.cost_per_million_tokens:,.4g} CNY"
    assert f"({cost} per million tokens)" in text
    assert f"{spent.tokens_per_joule:.4g} tokens per joule" in text
    page = "".join(s.body for s in planning_page(case.result, case.model, case.cluster).sections)
    assert cost in page
    assert "tokens per joule" in page
    document = case.result.to_document()["spending"]
    assert document["currency"] == "CNY"
    assert document["cost_per_million_tokens"] == spent.cost_per_million_tokens
    assert document["tokens_per_joule"] == spent.tokens_per_joule


def test_energies_have_units():
    assert [energy_text(x) for x in (2.0, 5e3, 7.5e6, 1e9)] == ["2 J", "5 kJ", "7.5 MJ", "1 GJ"]
