"""A search's answer in words: figures that add up, sentences that say why, 80 columns."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from tests.support.searches import Case, large_case, pipelines_case, small_case
from tutti.plan.plan import Offload, Recompute
from tutti.search.answer.explain import explain, render
from tutti.search.answer.explanation import Cause, Explanation, step_text
from tutti.search.answer.result import Objective
from tutti.simulate.estimate import estimate


@pytest.fixture(scope="module")
def small() -> Case:
    return small_case()


@pytest.fixture(scope="module")
def pipelines() -> Case:
    return pipelines_case()


def of(case: Case, **changes) -> Explanation:
    return explain(replace(case.result, **changes), case.model, case.cluster)


def with_stage(case: Case, index: int, **changes) -> Case:
    """Return the case with one stage's replica changed, and estimated anew."""
    plan = case.result.best.plan
    (pipeline,) = plan.pipelines
    stages = list(pipeline.stages)
    (replica,) = stages[index].replicas
    stages[index] = replace(stages[index], replicas=(replace(replica, **changes),))
    plan = replace(plan, pipelines=(replace(pipeline, stages=tuple(stages)),))
    best = replace(case.result.best, plan=plan, estimate=estimate(plan, case.model, case.cluster))
    return replace(case, result=replace(case.result, best=best))


def test_shares_add_up(small, pipelines):
    for case in (small, pipelines):
        found = of(case)
        assert sum(row.work_share for row in found.stages) == pytest.approx(1.0)
        assert sum(row.work_share for row in found.pools) == pytest.approx(1.0)
        assert sum(row.peak_share for row in found.pools) == pytest.approx(1.0)
        for row in (*found.stages, *found.pools):
            assert sum(row.idle.values()) == pytest.approx(row.idle_share)
        plan = case.result.best.plan
        for p, s, _ in plan.stages():
            shares = [r.batch_share for r in found.stages if (r.pipeline, r.stage) == (p, s)]
            assert sum(shares) == pytest.approx(1.0)


def test_rows_repeat_the_estimate(small):
    found = of(small)
    best = small.result.best.estimate
    assert [row.num_chips for row in found.stages] == [4, 4, 4, 4]
    assert [row.units for row in found.stages] == [
        "embedding, 1-16", "17-32", "33-37", "38-40, head"
    ]  # fmt: skip
    assert found.stages[0].recompute == "full 1-11"
    assert found.stages[0].num_recomputed == 11
    for row, memory, simulated in zip(found.stages, best.memory, best.result.classes, strict=True):
        assert (row.memory_bytes, row.limit_bytes) == (memory.total, memory.limit)
        assert row.idle_share == simulated.idle_share
        # 512 micro-batches and the optimizer are all that the compute lane does
        passes = 512 * row.micro_batch_seconds
        busy = (1 - row.idle_share) * best.result.step_seconds
        assert passes <= busy <= passes * 1.01


def test_the_bottleneck_is_the_busiest_and_says_why(small):
    found = of(small)
    assert found.bottleneck.row == 0
    assert found.stages[0].idle_share == min(row.idle_share for row in found.stages)
    assert found.bottleneck.sentence.startswith("Stage 0 on a800 is the busiest: it computes")

    plain = of(with_stage(small, 0, recompute=Recompute()))
    assert plain.bottleneck.cause is Cause.COMPUTE
    assert "bound by compute" in plain.bottleneck.sentence

    squeezed = of(with_stage(small, 1, recompute=Recompute(full=((17, 33),))))
    assert squeezed.bottleneck.row == 1
    assert squeezed.bottleneck.cause is Cause.MEMORY
    assert "to save memory it recomputes for" in squeezed.bottleneck.sentence
    assert squeezed.stages[1].recompute == "full, all"


def test_a_step_that_waits_for_the_network_is_bound_by_communication(small):
    best = small.result.best
    result = best.estimate.result
    seconds = dict.fromkeys(result.critical_seconds, 0.0) | {"Send": 0.9 * result.step_seconds}
    slow = replace(result)
    slow.__dict__["critical_seconds"] = seconds
    best = replace(best, estimate=replace(best.estimate, result=slow))
    found = of(small, best=best)
    assert found.bottleneck.cause is Cause.COMMUNICATION
    assert "90.0 % of the longest chain" in found.bottleneck.sentence


def test_what_is_held_against_the_plan(small):
    found = of(small)
    assert [item.name for item in found.compared] == [
        "this plan", "runner-up", "best uniform", "lower bound"
    ]  # fmt: skip
    assert found.compared[0].ratio == 1.0
    assert found.compared[2].ratio == pytest.approx(found.speedup)
    assert found.missing == ()
    together = sum(item.tokens_per_second for item in found.alone)
    assert found.mixed_efficiency_pct == pytest.approx(100 * found.tokens_per_second / together)
    assert "at most 3.63 % slower than the best" in found.bound  # 1 / 0.965
    rival = small.result.runner_up.step_seconds
    more = 100 * (rival / found.step_seconds - 1)
    said = f"takes {step_text(rival)}, {more:.2g} % more: its all-reduce of tensor slices"
    assert said in found.runner_up
    assert found.pruned == (
        "18 orders of pools, by the compute bound; none is faster than 140 s",
        "7 tensor widths, by memory",
    )
    assert found.work == "4,212 priced, 6 simulated"


def test_what_is_missing_says_why(pipelines):
    found = of(pipelines)
    assert found.missing == (
        "There is no uniform plan to compare with: no degree divides 8, 16 and 8 chips and keeps "
        "each replica in one pool.",
        "There is no figure for h100 and a100 alone: the search did not look for it.",
        "There is no figure for p800 alone: the search was asked to skip it.",
        "Without every pool's own throughput there is no mixed-chip efficiency.",
    )
    assert found.mixed_efficiency_pct is None
    assert found.speedup is None
    assert found.bound.endswith("this one is the best.")
    assert found.runner_up == "No other strategy came so far as to be simulated."
    unproven = of(pipelines, lower_bound_seconds=0.0)
    assert unproven.gap_pct is None
    assert unproven.bound == "The search proved no lower bound."
    assert [item.name for item in unproven.compared] == ["this plan"]


def test_a_cluster_of_one_pool_has_nothing_to_mix(small):
    alone = small.result.alone["a800"].proven
    cluster = replace(
        small.cluster, pools=small.cluster.pools[:1], fabric=type(small.cluster.fabric)()
    )
    result = replace(small.result, best=alone, runner_up=None, uniform=alone, alone={})
    found = explain(result, small.model, cluster)
    assert found.missing == ("The cluster has one pool, so there is no mixed-chip efficiency.",)
    assert "trains on 8 A800 chips in" in found.headline
    assert len(found.pools) == 1


def test_caveats_name_what_figures_rest_on(small, pipelines):
    assert [line.split(":")[0] for line in of(small).caveats] == [
        "Nominal",
        "v100 alone cannot hold the model and is predicted with unlimited memory, which makes the "
        "mixed-chip efficiency look worse than it is.",
        "Beyond what was measured",
    ]
    assert of(pipelines).caveats[0].startswith("The search was interrupted")
    assert [row.nominal for row in of(pipelines).pools] == [False, False, True]
    full = small.result.best.estimate
    tight = replace(full, memory=(replace(full.memory[0], limit=1e9), *full.memory[1:]))
    found = of(small, best=replace(small.result.best, estimate=tight))
    assert found.caveats[0].startswith(
        "1 replica group does not fit; the tightest, stage 0 on a800, needs "
    )


def test_words_say_what_the_plan_does(pipelines, small):
    words = " ".join(of(pipelines).details)
    assert "2 pipelines of 1 to 2 stages" in words
    assert "6 micro-batches of 10 sequences (93.8 %) and 2 micro-batches of 2 seq" in words
    assert "8 of 10 sequences go to h100 and 2 of 10 sequences go to a100" in words
    assert "3 chips are left out. 1 chip is kept in reserve." in words
    row = of(pipelines).pools[1]
    assert (row.unused_chips, row.spare_chips) == (3, 1)
    assert row.idle["no work"] == pytest.approx(4 / 16)
    moved = of(with_stage(small, 3, offload=Offload(optimizer=((38, 42),))))
    assert moved.stages[3].offload == "optimizer 38-41"
    assert "Host memory helps 1 replica group on v100." in moved.details
    assert "chosen for its energy" in of(small, objective=Objective.ENERGY).headline


def shown(found: Explanation, width: int) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=width).print(render(found))
    return text.getvalue().splitlines()


@pytest.mark.parametrize("make", [small_case, pipelines_case, large_case])
@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_terminal_of_80_columns_is_enough(make, width):
    case = make()
    lines = shown(of(case), width)
    assert max(map(len, lines)) <= min(width, 100)
    assert len(lines) < 90
    text = "\n".join(lines)
    assert "…" not in text, "nothing is cut"
    for heading in ("stages", "pools", "search"):
        assert heading in lines
    for pool in case.cluster.pools:
        assert pool.name in text


def test_64_stages_are_few_lines():
    lines = shown(of(large_case()), 100)
    rows = [line for line in lines if " × tp 8 + sp" in line]
    assert [row.split()[0] for row in rows] == ["0", "1-31", "32-47", "48-62", "63"]


def test_step_times_keep_their_unit():
    assert [step_text(s) for s in (0.25, 1.0, 121.44, 12_345.6)] == [
        "250 ms", "1 s", "121.4 s", "12,346 s"
    ]  # fmt: skip
