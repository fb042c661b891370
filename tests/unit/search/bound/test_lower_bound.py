"""The lower bound's terms, each where it bites: the lead, memory, the host, traffic, experts."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.enumeration import all_drafts, finish, price
from tests.support.instances import dense_first, memory_needs, with_memory
from tutti.hardware import library
from tutti.hardware.cluster import Cluster
from tutti.hardware.fabric import Fabric
from tutti.hardware.node import Bridge, trimmed
from tutti.hardware.pool import Pool
from tutti.models.memory import Recompute
from tutti.models.plain_decoder import plain_gpt
from tutti.plan.job import Job, ScheduleKind
from tutti.search.bound import lower_bound as bound
from tutti.search.bound.lower_bound import lower_bound
from tutti.search.bound.unit_choices import Ways, _Passes, ways_of
from tutti.search.pricing.unit_tables import FULL, NONE, Config, Tables
from tutti.search.question.space import Problem, Space
from tutti.search.thresholds import THRESHOLDS

CLOSE = 1e-9


def _problem(
    *,
    layers: int = 4,
    experts: bool = False,
    first: bool = False,
    slow_host: bool = False,
    **space: object,
) -> Problem:
    """Return a question whose step is little more than the way of a few micro-batches.

    With `first`, the first block of a model with experts has none.
    """
    node = trimmed(library.shipped().nodes["HGX-A800"], 2, "two")
    if slow_host:
        node = replace(node, host=replace(node.host, device_bandwidth=1e9, memory_bytes=1e9))
    cluster = Cluster(name="c", pools=(Pool(name="a", node=node, nodes=2),), fabric=Fabric())
    model = plain_gpt(
        layers=layers, hidden=1024, heads=8, kv_heads=8, ffn=2048, gated_mlp=True, vocab=32_000,
        sequence_length=1024, experts=4 if experts else None, topk=2 if experts else None,
        tied=False, name="small",
    )  # fmt: skip
    model = dense_first(model) if first else model
    options: dict[str, object] = {
        "tp": (1,),
        "cp": (1,),
        "ep": (1, 2) if experts else (1,),
        "sequences": (1, 4, 8),
        "schedules": (ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED),
        "virtual": (2,),
        "shard": (1,),
        "recompute": ("none",),
        "offload": (),
        "max_stages": 2,
        "uneven_units": False,
        "max_pipelines": 1,
    } | space
    job = Job(sequence_length=1024, global_batch=16)
    return Problem(model=model, cluster=cluster, job=job, space=Space(**options))  # type: ignore[arg-type]


_RECOMPUTE: tuple[Recompute, ...] = ("none", "full")
_STRESSED = {
    "lead": _problem(),
    "zero bubble": _problem(schedules=(ScheduleKind.ZERO_BUBBLE, ScheduleKind.GPIPE)),
    "recompute": _problem(recompute=_RECOMPUTE),
    "selective": _problem(recompute=("none", "selective", "full"), sequences=(2, 8)),
    "only full": _problem(recompute=("full",)),
    "host": _problem(offload=("activations",)),
    "slow host": _problem(offload=("activations",), recompute=_RECOMPUTE, slow_host=True),
    "states away": _problem(offload=("gradients", "parameters"), shard=(0, 3), sequences=(1, 8)),
    "levels": _problem(shard=(0, 2, 3), sequences=(1, 8)),
    "level 3": _problem(shard=(3,), recompute=_RECOMPUTE),
    "experts": _problem(experts=True, shard=(1, 3), sequences=(1, 8)),
    "dense first": _problem(experts=True, first=True, recompute=_RECOMPUTE, sequences=(1, 8)),
    "dense first, shared": _problem(experts=True, first=True, shard=(0, 2, 3), sequences=(1, 4)),
    "dense first, away": _problem(
        experts=True, first=True, recompute=_RECOMPUTE, offload=("activations",), slow_host=True
    ),
}


@pytest.mark.parametrize("name", _STRESSED)
def test_no_plan_on_chips_that_just_hold_it_beats_the_bound(name):
    """Micro-batches of half the batch: nearly all of a step is lead, and memory is just enough."""
    problem = _STRESSED[name]
    tables = Tables(problem)
    drafts = list(itertools.islice(all_drafts(problem), 4000))
    assert len(drafts) > 3
    for draft in random.Random(name).sample(drafts, min(25, len(drafts))):
        priced = price(finish(draft, tables), tables)
        if priced is None:
            continue
        just = tables.for_problem(with_memory(problem, memory_needs(priced)))
        assert 0.0 < lower_bound(just) <= priced.step_seconds * (1 + CLOSE), draft


def test_less_memory_never_lowers_the_bound_and_little_raises_it():
    problem = _problem(layers=24, sequences=(8,))
    tables = Tables(problem)
    found = []
    for gigabytes in (64.0, 16.0, 8.0, 6.0, 4.0, 2.0):
        smaller = tables.for_problem(with_memory(problem, {"a": gigabytes * 1e9}))
        found.append(lower_bound(smaller))
    held = [bound for bound in found if bound > 0.0]  # 0: not even a unit fits
    assert held == sorted(held)
    assert held[-1] > 1.02 * held[0]


def test_a_way_to_the_host_never_raises_the_bound():
    plain = _problem(layers=24, sequences=(8,))
    away = _problem(layers=24, sequences=(8,), offload=("activations",))
    for gigabytes in (8.0, 4.0):
        limits = {"a": gigabytes * 1e9}
        bounds = [lower_bound(Tables(with_memory(p, limits))) for p in (away, plain)]
        assert 0.0 < bounds[0] <= bounds[1]


def test_chips_lose_more_the_longer_the_lead():
    ways = ways_of(Tables(with_memory(_problem(layers=24), {"a": 4e9})))
    assert ways is not None
    idle = ways.idle(np.linspace(0.0, 1.0, 50))
    assert (np.diff(idle, axis=2) >= -1e-12).all()
    assert idle[:, :, 0].max() == 0.0
    assert idle.max() > 0.0


def test_unlimited_memory_knows_no_lead():
    problem = replace(_problem(), unlimited_memory=True)
    ways = ways_of(Tables(problem))
    assert ways is not None
    assert ways.idle(np.array([1e3])).max() == 0.0


@pytest.mark.parametrize("allowed", [("none",), ("none", "full")])
@pytest.mark.parametrize("kept", [0.0, 0.3, 1.0, 1.7])
def test_units_are_charged_less_by_what_they_keep_less(allowed, kept):
    table = Tables(_problem()).get(Config("a"))
    assert table is not None
    changed = table.kept.copy()
    changed[NONE, 1] = kept * table.kept[NONE, 2]
    passes = _Passes.of(replace(table, kept=changed), allowed, main=[2, 3, 4])
    free = max(0.0, 1.0 - kept)
    assert passes.charged[1] == pytest.approx(passes.seconds[1] - free * table.forward[NONE, 1])
    assert passes.charged[2] == passes.seconds[2]
    assert passes.charged[-1] == passes.seconds[-1]  # the head has no part in the lead


def test_memory_that_is_cheap_to_win_back_counts_as_little():
    table = Tables(_problem()).get(Config("a"))
    assert table is not None
    again = table.recompute.copy()
    again[FULL, 1] *= 0.4
    cheaper = replace(table, recompute=again)
    passes = _Passes.of(cheaper, ("none", "full"), main=[2, 3, 4])
    longer = (cheaper.seconds[FULL] - cheaper.seconds[NONE]) / table.forward[NONE]
    assert longer[1] < 0.9 * longer[2]
    free = (passes.seconds[1] - passes.charged[1]) / table.forward[NONE, 1]
    assert free == pytest.approx(1.0 - longer[1] / min(1.0, longer[2]))


def _slow_links(problem: Problem) -> Problem:
    """Return the question on chips that hardly talk, so that sharing takes longer than passes."""
    (pool,) = problem.cluster.pools
    node = replace(
        pool.node,
        islands=tuple(replace(island, bandwidth=1e8) for island in pool.node.islands),
        nics=tuple(replace(nic, rate=1e8) for nic in pool.node.nics),
        bridge=Bridge(bandwidth=1e8),
    )
    return replace(problem, cluster=replace(problem.cluster, pools=(replace(pool, node=node),)))


def test_no_unit_is_free_where_a_configuration_must_share():
    """The memory holds an expert block whose experts are spread over two chips, and no other.

    A chip that has all experts must share them, over links that are its narrower place. Charged
    for the links alone, it would compute embeddings for nothing; charged for both, its expert
    blocks cost as much as where they need not be shared.
    """
    problem = _slow_links(_problem(experts=True, shard=(0, 3), sequences=(1,)))
    ways = ways_of(Tables(with_memory(problem, {"a": 1.45e9})))
    assert ways is not None
    mixed = (ways.again > 0.0) & (ways.again < 1.0)
    assert 0 < mixed.sum() < len(mixed)
    assert ways.work.min() > 0.0
    held = np.where(np.isfinite(ways.work[:, 1]), ways.work[:, 1], np.inf)
    assert held[mixed].min() == pytest.approx(held[~mixed].min())


def test_a_head_that_fits_where_no_block_does_is_not_free():
    problem = _slow_links(_problem(experts=True, shard=(0, 3), sequences=(1,)))
    for gigabytes in np.arange(1.3, 1.6, 0.01).tolist():
        ways = ways_of(Tables(with_memory(problem, {"a": gigabytes * 1e9})))
        assert ways is not None
        assert ways.work.min() > 0.0


def test_chips_that_only_help_do_not_hide_how_long_the_others_take():
    """Many V100s that hold no block with experts: a few A800s have all of these to do."""
    few = _problem(sequences=(2,))
    model = plain_gpt(
        layers=8, hidden=1024, heads=8, kv_heads=8, ffn=2048, gated_mlp=True, vocab=32_000,
        sequence_length=1024, experts=32, topk=2, tied=False, name="sparse",
    )  # fmt: skip
    (pool,) = few.cluster.pools
    node = trimmed(library.shipped().nodes["DGX-1-V100-32"], 2, "two-v")
    helper = Pool(name="v", node=node, nodes=16)
    problem = replace(
        few,
        model=dense_first(model),
        cluster=replace(few.cluster, pools=(pool, helper)),
    )
    tables = Tables(with_memory(problem, {"a": 20e9, "v": 2e9}))
    ways = ways_of(tables)
    assert ways is not None
    assert bound._helpers(ways, 2).tolist() == [False, True]
    main = int(ways.counts[1:-1].argmax()) + 1
    work = ways.work[ways.pool == 0][:, main].min() * ways.counts[main]
    assert lower_bound(tables) >= problem.job.global_batch * work / pool.num_chips


# --- the price of a sequence -----------------------------------------------------------------


def _tight_ways() -> Ways:
    """Return ways of two unlike pools whose memory is short, so that leads matter."""
    cluster = Cluster(
        name="c",
        pools=tuple(
            Pool(name=name, node=trimmed(library.shipped().nodes[node], 2, f"two-{name}"), nodes=2)
            for name, node in (("a", "HGX-A800"), ("v", "DGX-1-V100-32"))
        ),
        fabric=Fabric(),
    )
    problem = replace(
        _problem(
            layers=24, tp=(1, 2), shard=(0, 2, 3), recompute=_RECOMPUTE, offload=("activations",)
        ),
        cluster=cluster,
    )
    found = ways_of(Tables(with_memory(problem, {"a": 6e9, "v": 5e9})))
    assert found is not None
    return found


_TIGHT = _tight_ways()
_PRICES = st.tuples(st.floats(0.5, 2.0), st.floats(0.5, 2.0)).map(np.array)
_SECONDS = st.floats(1.0, 20.0)


@settings(max_examples=30)
@given(prices=_PRICES, seconds=_SECONDS, draw=st.randoms(use_true_random=False))
def test_no_path_costs_less_than_the_price_of_a_sequence(prices, seconds, draw):
    """Whatever the ways of its units, a path pays for the idle seconds of its own lead."""
    leads = bound._Leads(_TIGHT, fluid=1.0)
    price = leads._cost(prices, seconds)
    columns = range(len(_TIGHT.counts))
    held = [np.flatnonzero(np.isfinite(_TIGHT.work[:, k])).tolist() for k in columns]
    for _ in range(20):
        # Of one configuration, as most pipelines are, or of a different one for every unit kind.
        one = draw.choice(held[1])
        rows = [one if one in held[k] and draw.random() < 0.7 else draw.choice(held[k])
                for k in columns]  # fmt: skip
        forward = _TIGHT.forward[rows, columns] * _TIGHT.counts
        lead = float(forward[:-1].sum())
        if lead >= seconds:
            continue
        idle = _TIGHT.idle(np.array([lead]))[rows, columns, 0]
        worked = seconds - np.minimum(idle, 0.9 * seconds)
        paid = prices[_TIGHT.pool[rows]] * _TIGHT.work[rows, columns] / worked
        assert price <= float((paid * _TIGHT.counts).sum()) * (1 + CLOSE)


@given(lead=st.floats(0.0, 10.0))
def test_no_way_is_dropped_that_some_lead_needs(lead):
    few = bound._undominated(_TIGHT)
    assert len(few.pool) < len(_TIGHT.pool)
    for pool in (0, 1):
        costs = []
        for ways in (_TIGHT, few):
            idle = np.minimum(ways.idle(np.array([lead]))[:, :, 0], 9.0)
            cost = np.where(np.isfinite(ways.work), ways.work, np.inf) / (10.0 - idle)
            costs.append(cost[ways.pool == pool].min(axis=0))
        np.testing.assert_allclose(costs[0], costs[1], rtol=CLOSE)


@settings(max_examples=30)
@given(prices=_PRICES, lead=st.floats(0.0, 10.0), price=st.floats(0.0, 10.0))
def test_the_ways_that_are_looked_at_are_the_cheapest_at_any_price_of_the_lead(prices, lead, price):
    leads = bound._Leads(_TIGHT, fluid=1.0)
    idle = leads._ways.idle(np.array([lead]))[:, :, 0]
    cost = bound._paid(leads._ways, prices) / (20.0 - idle)
    for kind in range(cost.shape[1]):
        costs, seconds, count = leads._front(cost, kind)
        assert count == _TIGHT.counts[kind]
        assert (np.diff(costs) < 0.0).all()
        assert (np.diff(seconds) >= 0.0).all()
        least = (cost[:, kind] + price * leads._lead[:, kind]).min()
        assert (costs + price * seconds).min() == pytest.approx(least, rel=CLOSE)


@settings(max_examples=30)
@given(prices=_PRICES, seconds=_SECONDS)
def test_finer_cells_raise_the_price_and_no_more_than_they_are_finer(prices, seconds):
    found = []
    for narrow in (0.3, 0.1, 0.01, 0.003):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bound, "THRESHOLDS", replace(THRESHOLDS, bound_narrow=narrow))
            found.append(bound._Leads(_TIGHT, fluid=1.0)._cost(prices, seconds))
    assert found == sorted(found)
    assert found[-1] <= 1.02 * found[-2]


@settings(max_examples=15)
@given(prices=_PRICES, batch=st.floats(5.0, 1e3))
def test_the_least_time_is_too_short_and_a_little_more_is_not(prices, batch):
    chips = np.array([4.0, 4.0])
    start = bound._fluid(_TIGHT, chips, batch, prices)
    leads = bound._Leads(_TIGHT, start)
    worth = float((prices * chips).sum())
    reached = leads.least_time(prices, chips, batch, start)
    assert reached >= start
    if reached > start:
        assert batch * leads._cost(prices, reached) > worth
    assert batch * leads._cost(prices, reached * 1.001) <= worth * 1.001


def test_a_price_that_no_lead_can_pay_is_infinite():
    leads = bound._Leads(_TIGHT, fluid=1.0)
    assert leads._cost(np.array([1.0, 1.0]), 5.0, only=7) == float("inf")
