"""Steps priced with what earlier plans had already: the same to the last bit, whatever changed."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.plans import NODES, plans, small_model
from tutti.bench.judge.changes import single_changes
from tutti.cost.plan import class_memo
from tutti.document import Place
from tutti.errors import TuttiError
from tutti.hardware.cluster import Cluster
from tutti.hardware.fabric import CrossKind, CrossLink, Tier
from tutti.models.parameters import ParameterClass
from tutti.plan.check import check_plan, require_valid
from tutti.plan.chips import ChipSet
from tutti.plan.files import refer_to_cluster, refer_to_model
from tutti.plan.job import Job
from tutti.plan.plan import ExpertGroup, Pipeline, Plan, Replica, Stage, Synchronisation
from tutti.simulate.estimate import PricingMemo, estimate

FEW = settings(max_examples=max(6, settings.default.max_examples // 15))
PLANS_EACH = 6
WIDTH, LENGTH = 2048, 4096
FABRICS = ("even", "narrow", "forwarded", "oversubscribed")


def on_fabric(plan, fabric):
    """Return a drawn plan on the same pools with other links, and messages that take time there."""
    spec, cluster, names = plan.model.spec, plan.cluster.cluster, sorted(NODES)
    values = {
        "narrow": {"bandwidth": 1e9, "latency_s": 1e-4},
        "forwarded": {"kind": CrossKind.HOST_FORWARDED},
    }.get(fabric)
    links = ()
    if values is not None:
        links = tuple(CrossLink(pools=(names[0], other), **values) for other in names[1:])
    made = replace(cluster.fabric, links=links)
    if fabric == "oversubscribed":
        made = replace(
            made,
            tiers=(Tier(name="leaf", nodes=2), Tier(name="spine", oversubscription=4.0)),
        )
    model = replace(
        spec, hidden=WIDTH, max_length=LENGTH, embedding=replace(spec.embedding, dim=WIDTH)
    )
    return replace(
        plan,
        model=refer_to_model(model),
        cluster=refer_to_cluster(replace(cluster, fabric=made)),
        job=replace(plan.job, sequence_length=LENGTH),
        collectives=(),
    )


def spreads(plan):
    return any(stage.experts for _, _, stage in plan.stages())


def neighbours(plan, dice):
    """Yield the plan, then changed ones: mostly of the plan, some of the one before."""
    model, cluster = plan.model.spec, plan.cluster.cluster
    yield "as drawn", plan
    here, number = plan, 0
    kinds = {}
    for change in single_changes(plan, model):
        kinds.setdefault(change.kind, []).append(change)
    for kind in dice.sample(sorted(kinds), len(kinds)):
        for change in dice.sample(kinds[kind], min(3, len(kinds[kind]))):
            if not check_plan(change.plan, model, cluster):
                yield kind, change.plan
                here, number = change.plan, number + 1
                break
        if number % 3 == 0:
            further = list(single_changes(here, model))
            change = dice.choice(further)
            if not check_plan(change.plan, model, cluster):
                yield f"{kind}, {change.kind}", change.plan


def assert_the_same(known, anew, what):
    assert known.step_seconds == anew.step_seconds, what
    assert known.memory == anew.memory, what
    assert known.priced.choices == anew.priced.choices, what
    for one, other in zip(known.priced.costs.classes, anew.priced.costs.classes, strict=True):
        for name in ("seconds", "allocate_bytes", "free_bytes", "leaves_node"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), (what, name)
        assert one.static_bytes == other.static_bytes, what


def compared(plan, dice, most):
    """Price a plan and its neighbours with one memo and without; return how many have experts."""
    memo, priced = PricingMemo.empty(), Counter()
    for what, changed in neighbours(plan, dice):
        try:
            anew = estimate(changed)
        except TuttiError:  # an order that cannot run
            continue
        assert_the_same(estimate(changed, memo=memo), anew, what)
        priced["spread" if spreads(changed) else "whole"] += 1
        if priced.total() == most:
            break
    return priced


@FEW
@given(plan=plans(), fabric=st.sampled_from(FABRICS), seed=st.integers(0, 999))
def test_prices_with_a_memo_are_those_without(plan, fabric, seed):
    assert compared(on_fabric(plan, fabric), random.Random(seed), PLANS_EACH).total()


@pytest.mark.slow  # plans of the test above spread experts now and then
@FEW
@given(plan=plans().filter(spreads), fabric=st.sampled_from(FABRICS), seed=st.integers(0, 999))
def test_prices_of_spread_experts_with_a_memo_are_those_without(plan, fabric, seed):
    assert compared(on_fabric(plan, fabric), random.Random(seed), PLANS_EACH)["spread"]


# Two pipelines hold all units. Only the second one changes, and with it what the first one's
# gradients and parameters meet: (chips of its two stages, what differs).
FIRST, NEAR, FAR = ("a/0/0-3", "a/1/0-3"), ("a/0/4-7", "a/1/4-7"), ("a/2/0-3", "a/2/4-7")
SECOND = {
    "where it lies": (FAR, {}),
    "tensor for data parallelism": (NEAR, {"tp": 1}),
    "where the model is cut": (NEAR, {"cut": 4}),
    "how experts are spread": (NEAR, {"experts": 4}),
}


def two_pipelines(level, chips, *, cut=2, tp=2, experts=2):
    """Return a plan of two pipelines of two stages, the first one always the same."""
    model = small_model(4, experts_in=(0, 1, 2, 3))
    model = replace(
        model, hidden=WIDTH, max_length=LENGTH, embedding=replace(model.embedding, dim=WIDTH)
    )
    # One pool: over links between pools, keys hold the whole plan anyway.
    pool = {"name": "a", "chip": "A800", "chips_per_node": 8, "nodes": 3}
    cluster = Cluster.from_document({"name": "one", "pools": [pool]}, Place("one"))

    def pipeline(chips, cut, tp, experts):
        spread = (ExpertGroup(chips=experts, count=4 // experts),)
        replicas = [
            Replica(chips=ChipSet.of(some), tp=tp, count=4 // tp, sequences=tp) for some in chips
        ]
        units = ((0, cut), (cut, model.num_units))
        stages = tuple(
            Stage(units=(span,), replicas=(replica,), experts=spread)
            for span, replica in zip(units, replicas, strict=True)
        )
        return Pipeline(micro_batch=4, micro_batches=3, stages=stages)

    both = (pipeline(FIRST, 3, 2, 2), pipeline(chips, cut, tp, experts))
    used = {chip for each in both for stage in each.stages for chip in stage.chips}
    every = set(ChipSet.of("a/0-2/0-7"))
    rules = tuple(
        Synchronisation(units=(0, model.num_units), parameter_class=kind, shard_level=level)
        for kind in ParameterClass
    )
    plan = Plan(
        model=refer_to_model(model),
        cluster=refer_to_cluster(cluster),
        job=Job(sequence_length=LENGTH, global_batch=24),
        pipelines=both,
        synchronisation=rules,
        idle=ChipSet.from_ids(sorted(every - used)),
    )
    require_valid(plan)
    return plan


def after(plan, changed):
    """Return prices of a plan, looked up by a memo that has seen another, and those anew."""
    memo = PricingMemo.empty()
    estimate(plan, memo=memo)
    return estimate(changed, memo=memo), estimate(changed)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("what", SECOND)
def test_a_class_is_priced_anew_when_others_who_hold_its_units_change(what, level, monkeypatch):
    """And a memo that forgot to ask who holds them would say something else."""
    plan = two_pipelines(level, NEAR)
    chips, differs = SECOND[what]
    changed = two_pipelines(level, chips, **differs)
    assert_the_same(*after(plan, changed), what)
    monkeypatch.setattr(class_memo, "_holders", lambda stage, shared: ())
    with pytest.raises(AssertionError):
        assert_the_same(*after(plan, changed), what)
