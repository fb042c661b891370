"""Micro-batches of other sizes: whole batches, the best that whole micro-batches can do."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.chains import one_stage
from tutti.document import Place
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.plan.check import check_plan
from tutti.plan.job import Job
from tutti.plan.uniform import Degrees, uniform_plan
from tutti.search.ask_from_values import make_problem
from tutti.search.bound.lower_bound import lower_bound
from tutti.search.coarse.pool_crossing import Crossing
from tutti.search.cutting.build_draft import PipelineCopies, cuts_of, split_batch
from tutti.search.cutting.micro_batch_sizes import _first_even, _Load, fluid_end, resized
from tutti.search.cutting.refine import Refiner
from tutti.search.planner import plan
from tutti.search.pricing.pipeline_recurrence import chain_seconds
from tutti.search.pricing.unit_tables import Config, Tables
from tutti.search.question.effort import Effort
from tutti.search.question.space import Problem, Space
from tutti.search.question.what_if import change_cluster
from tutti.search.strategy.candidate import Candidate
from tutti.search.strategy.space_limits import plan_in_space

LLAMA = load_model("llama-3.2-1b")
MIXED = Cluster.load("small-mixed")
JOB = Job(sequence_length=1024, global_batch=768)
CUT = Effort(last_mile=0)  # a local search could mend what other sizes have to


def taken(parts: tuple[PipelineCopies, ...]) -> int:
    return sum(part.copies * part.micro_batches * part.chain.sequences for part in parts)


def end(parts: tuple[PipelineCopies, ...]) -> float:
    return max(part.chain.fill + part.micro_batches * part.chain.pace for part in parts)


def load(pool: str, sequences: int, count: int, seconds: float) -> _Load:
    own = one_stage(99, sequences, pool=pool, pace=seconds / count)
    return _Load(sequences * count, seconds, own, count)


# --- adding up -------------------------------------------------------------------------------

LOADS = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 40)),
    min_size=1, max_size=4, unique_by=lambda entry: entry[0] * entry[1],
)  # fmt: skip


@given(
    st.lists(st.tuples(LOADS, st.integers(1, 6)), min_size=1, max_size=3),
    st.integers(1, 150),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_no_other_loads_that_add_up_end_sooner(drawn, total, idle):
    loads = [
        [load(f"pool{k}", b, n, float(s)) for b, n, s in sorted(own, key=lambda e: e[0] * e[1])]
        for k, (own, _) in enumerate(drawn)
    ]
    copies = [count for _, count in drawn]
    best = math.inf
    for chosen in itertools.product(*loads):
        slowest = max(one.seconds for one in chosen)
        whole = sum(n * one.sequences for n, one in zip(copies, chosen, strict=True))
        if whole == total:
            best = min(best, slowest)
        for place, own in enumerate(loads):  # some copies of one chain take another load
            rest = [(other.sequences, other.seconds) for other in own]
            rest += [(0, 0.0)] if idle else []
            for (sequences, seconds), few in itertools.product(rest, range(1, copies[place])):
                less = chosen[place].sequences - sequences
                if less > 0 and whole - few * less == total and seconds <= slowest:
                    best = min(best, slowest)
    found = _first_even(loads, copies, total, math.inf, idle=idle)
    if found is None:
        assert math.isinf(best)
    else:
        assert taken(found) == total
        assert end(found) == pytest.approx(best)
        assert sum(part.copies for part in found) <= sum(copies)
        assert idle or sum(part.copies for part in found) == sum(copies)


def test_what_is_not_sooner_than_the_limit_is_not_returned():
    loads = [[load("a", 4, 2, 10.0)]]
    assert _first_even(loads, [4], 32, 10.0) is None
    found = _first_even(loads, [4], 32, 10.1)
    assert found is not None
    assert taken(found) == 32


def test_a_copy_may_stay_idle_where_chips_may():
    own = [load("a", 3, 11, 10.0)]
    assert _first_even([own], [5], 132, math.inf) is None
    found = _first_even([own], [5], 132, math.inf, idle=True)
    assert found is not None
    assert [(part.copies, part.chain.copies) for part in found] == [(4, 4)]


def test_of_equal_sizes_copies_stay_one_chain():
    own = one_stage(4, 3, pool="a")
    more, less = (_Load(3 * n, float(n), own, n) for n in (3, 2))
    found = _first_even([[less, more]], [4], 30, 9.0)
    assert found is not None
    assert [(part.copies, part.micro_batches) for part in found] == [(2, 3), (2, 2)]
    assert found[0].chain is found[1].chain


def test_the_fluid_end_is_when_all_end_at_once():
    figures = [(4.0, 1.0), (2.0, 3.0)]
    reached = fluid_end(figures, 26)
    assert sum(rate * (reached - fill) for rate, fill in figures) == pytest.approx(26)


def test_pools_that_take_nothing_give_nothing_back():
    # a round of the second chain ends too late: all is taken by the first, too much of it
    slow = one_stage(8, 16, pool="h100", pace=100.0)
    for copies in (63, 64):
        found = split_batch((one_stage(copies, 4, pool="a100"), slow), 480)
        assert found is None or taken(found) == 480


def test_few_copies_that_share_states_are_no_reason_to_give_a_strategy_up():
    """65 copies of 2 × 16 sequences: two of them would have one, and all the states to hold."""
    cluster = change_cluster(Cluster.load("B1024"), "+8xA800").cluster
    problem = make_problem("gpt-3-175b", cluster, sequence_length=2048, global_batch=4096)
    tables = Tables(problem)
    config = Config("a800", tp=8, sequences=16)
    own = replace(one_stage(65, 16, pool="a800", pace=20.0), configs=(config,), shard=2)
    ragged = split_batch((own,), 2048)
    assert ragged is not None
    assert [(part.copies, part.micro_batches) for part in ragged] == [(63, 2), (2, 1)]
    assert cuts_of(tables, ragged) is None
    refiner = Refiner(tables, Crossing(problem))
    asked = replace(problem, job=replace(problem.job, global_batch=2048))
    refiner.problem = tables.problem = asked
    (found,) = refiner.refined([Candidate((own,), ragged, 45.0)])
    assert taken(found.parts) == 2048
    assert cuts_of(tables, found.parts) is not None


# --- sizes of a strategy ---------------------------------------------------------------------


def tables_of(space: Space | None = None, job: Job = JOB, cluster: Cluster = MIXED) -> Tables:
    return Tables(Problem(model=LLAMA, cluster=cluster, job=job, space=space or Space()))


def test_a_copy_less_need_not_cost_a_round():
    # 15 copies of 16 sequences: 768 of them are 4 rounds, the last one nearly empty
    tables = tables_of()
    own = (one_stage(15, 16, pool="a100"),)
    ragged = split_batch(own, 768)
    assert ragged is not None
    found = resized(tables, own, ragged, {})
    assert found is not None
    assert taken(found) == 768
    most = max(part.micro_batches * part.chain.sequences for part in found)
    assert most == math.ceil(768 / 15)  # 52 instead of 64
    assert {part.chain.sequences for part in found} - {1, 2, 4, 8, 16}


@pytest.mark.parametrize(("copies", "size"), [(16, 8), (15, 16), (13, 4), (11, 2)])
def test_other_sizes_are_faster_or_not_chosen(copies, size):
    tables = tables_of()
    own = (one_stage(copies, size, pool="a100"),)
    usual = split_batch(own, 768)
    assert usual is not None
    found = resized(tables, own, usual, {})
    if found is not None:
        assert played(tables, found) < played(tables, usual)
    elif 768 % copies:
        # nothing to gain: no copy takes much more than its part
        most = max(part.micro_batches * part.chain.sequences for part in usual)
        assert most < 1.15 * 768 / copies


def played(tables: Tables, parts: tuple[PipelineCopies, ...]) -> float:
    cuts = cuts_of(tables, parts)
    assert cuts is not None
    return max(chain_seconds(tables, *pair) for pair in zip(parts, cuts, strict=True))


def test_strategies_that_do_not_add_up_are_mended():
    chains = (one_stage(15, 16, pool="a100"), one_stage(8, 16, pool="h100"))
    seed = tuple(PipelineCopies(chain=c, copies=c.copies, micro_batches=2) for c in chains)
    assert taken(seed) != 768
    found = resized(tables_of(), chains, seed, {})
    assert found is not None
    assert taken(found) == 768


def test_only_sizes_of_the_space_are_chosen():
    given_sizes = tables_of(Space(sequences=(4, 8, 16)))
    own = (one_stage(15, 16, pool="a100"),)
    ragged = split_batch(own, 768)
    assert ragged is not None
    assert given_sizes.problem.all_sequence_counts() == (4, 8, 16)
    assert resized(given_sizes, own, ragged, {}) is None
    experts = replace(tables_of().problem, model=load_model("deepseek-v2-lite"))
    assert experts.all_sequence_counts() == experts.sequence_counts()


def test_small_models_may_have_larger_micro_batches():
    """The more numbers there are between two blocks, the sooner products are large enough."""
    problem = tables_of().problem
    assert problem.sequence_counts() == (1, 2, 4, 8, 16, 32, 64, 128)
    sizes = problem.all_sequence_counts()
    assert sizes == (*range(1, 17), *range(18, 33, 2), *range(36, 65, 4), *range(72, 129, 8))
    longer = replace(problem, job=replace(JOB, sequence_length=4096))
    assert longer.sequence_counts()[-1] == 32
    wide = replace(longer, model=load_model("llama-2-70b"))
    assert wide.sequence_counts()[-1] == 16
    few = replace(problem, job=replace(JOB, global_batch=48))
    assert few.all_sequence_counts()[-3:] == (40, 44, 48)


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [(71, (1, 2, 4, 8, 16, 32, 64, 71)), (14, (1, 2, 4, 7, 8, 14)), (96, (1, 2, 4, 8, 16, 32, 64))],
)
def test_what_divides_an_odd_batch_is_a_size(batch, sizes):
    assert tables_of(job=replace(JOB, global_batch=batch)).problem.sequence_counts() == sizes


SLOW = pytest.mark.slow


@pytest.mark.parametrize("batch", [23, *(pytest.param(n, marks=SLOW) for n in (59, 71))])
def test_a_prime_batch_costs_hardly_more_than_one_sequence_more(batch):
    """Three single chips; what divides a prime is one or all of it, so pipelines share it out."""
    chips = {"old": "A100-40", "small": "L40S", "new": "MI300X"}
    pools = [{"name": name, "chip": chip, "chips_per_node": 1} for name, chip in chips.items()]
    cluster = Cluster.from_document({"name": "three", "pools": pools}, Place("three"))
    steps = [
        plan(
            make_problem("llama-3.2-1b", cluster, sequence_length=1024, global_batch=whole),
            compare=False,
        ).best.step_seconds
        for whole in (batch, batch + 1)
    ]
    assert steps[0] <= 1.02 * steps[1]


@pytest.mark.parametrize(
    ("sequences", "allowed"),
    [(11, True), (17, True), (18, True), (120, True), (65, False), (144, False)],
)
def test_a_plan_has_sizes_that_the_bound_knows(sequences, allowed):
    job = replace(JOB, global_batch=16 * sequences)
    degrees = Degrees(dp=1, micro_batch=sequences)
    written = uniform_plan(LLAMA, MIXED, job, degrees, chips={"a100": 1})
    assert not check_plan(written, LLAMA, MIXED)
    assert plan_in_space(written, tables_of(job=job).problem) is allowed


def test_the_bound_covers_all_sizes():
    usual = lower_bound(tables_of(Space(sequences=(1, 2, 4, 8, 16))))
    every = lower_bound(tables_of())
    assert 0 < every <= usual * (1 + 1e-9)


def test_bytes_of_a_configuration_are_those_of_its_own_chips():
    together = tables_of()
    for config in (Config("a100", 2, 1, 1, 3), Config("h100", 2, 1, 1, 3), Config("h100", 2)):
        known, alone = together.get(config), tables_of().get(config)
        assert known is not None
        assert alone is not None
        for name in ("kept", "passing", "dense", "parameter_bytes", "optimizer_bytes"):
            assert np.array_equal(getattr(known, name), getattr(alone, name))
        assert known.boundary == alone.boundary


@pytest.mark.parametrize("batch", [60, *(pytest.param(n, marks=SLOW) for n in (90, 210))])
def test_a_lost_node_costs_about_its_part(batch):
    """No cliff where what is left no longer divides the batch."""
    cluster = change_cluster(MIXED, "+48xA100").cluster
    job = Job(sequence_length=1024, global_batch=8 * batch)
    whole = plan(Problem(model=LLAMA, cluster=cluster, job=job), compare=False, effort=CUT)
    fewer = change_cluster(cluster, "-node 0").cluster
    lost = plan(Problem(model=LLAMA, cluster=fewer, job=job), compare=False, effort=CUT)
    chips = sum(pool.num_chips for pool in cluster.pools)
    assert lost.best.step_seconds < whole.best.step_seconds * chips / (chips - 8) * 1.12


def test_many_micro_batches_make_no_endless_list():
    """Each of two chains may take thousands of loads: those near the fluid end are enough."""
    job = Job(sequence_length=1024, global_batch=60_001)
    chains = (one_stage(7, 4, pool="a100"), one_stage(5, 4, pool="h100"))
    seed = tuple(PipelineCopies(chain=c, copies=c.copies, micro_batches=1250) for c in chains)
    found = resized(tables_of(job=job), chains, seed, {})
    assert found is not None
    assert taken(found) == 60_001
