"""What a chain takes by recurrence, and between chains, is about what the simulator says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tutti.document import Place
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.plan.job import Job, ScheduleKind
from tutti.plan.schedules import schedule_record
from tutti.search.ask_from_values import make_problem
from tutti.search.coarse.pool_crossing import Crossing
from tutti.search.cutting.build_draft import PipelineCopies, cuts_of, draft_of
from tutti.search.planner import Search
from tutti.search.pricing.pipeline_recurrence import chain_seconds
from tutti.search.pricing.simulate_draft import DraftSimulator
from tutti.search.pricing.unit_tables import Config, Tables
from tutti.search.question.effort import Effort
from tutti.search.question.space import Problem
from tutti.search.strategy.coarse_chain import Chain, ScheduleOption


def two_pools(bandwidth: str, model: str = "llama-2-7b") -> Problem:
    """Two nodes of unlike chips, between which a chip has so many bytes per second."""
    document = {
        "name": "far-apart",
        "pools": [
            {"name": "new", "chip": "A100-80", "chips_per_node": 4},
            {"name": "old", "chip": "V100-32", "chips_per_node": 4},
        ],
        "fabric": {"links": [{"pools": ["new", "old"], "bandwidth": bandwidth}]},
    }
    return Problem(
        model=load_model(model),
        cluster=Cluster.from_document(document, Place("test")),
        job=Job(sequence_length=1024, global_batch=64),
    )


def chain_of(*pools: str, stages: int = 1, tp: int = 2, copies: int = 2, shard: int = 0) -> Chain:
    return Chain(
        configs=tuple(Config(pool, tp=tp) for pool in pools),
        stages=(stages,) * len(pools), copies=copies, sequences=1,
        schedule=ScheduleOption(kind=ScheduleKind.ONE_F_ONE_B), shard=shard, pace=0.0, fill=0.0,
        closing=0.0,
    )  # fmt: skip


def both(asked: Problem, chain: Chain) -> tuple[float, float]:
    """Return the step by recurrence and by the simulator."""
    tables = Tables(asked)
    rounds = asked.job.global_batch // chain.copies
    parts = (PipelineCopies(chain=chain, copies=chain.copies, micro_batches=rounds),)
    cuts = cuts_of(tables, parts)
    draft = draft_of(tables, parts)
    assert cuts is not None
    assert draft is not None
    simulator = DraftSimulator(tables)
    simulated = simulator.price(simulator.plan_of(draft)).step_seconds
    return chain_seconds(tables, parts[0], cuts[0]), simulated


@pytest.mark.parametrize("bandwidth", ["20 GB/s", "100 MB/s", "20 MB/s"])
def test_a_boundary_carries_one_micro_batch_after_the_other(bandwidth):
    """Deep pipelines have many under way at once: a slow link decides their pace."""
    asked = two_pools(bandwidth)
    recurrence, simulated = both(asked, chain_of("new", "old", stages=4, tp=1, copies=1))
    assert recurrence == pytest.approx(simulated, rel=0.03)
    link = float(bandwidth.split()[0]) * (1e9 if "GB" in bandwidth else 1e6)
    assert simulated > 64 * 1024 * asked.model.hidden * 2 / link


def test_a_table_that_two_stages_hold_travels_between_them():
    asked = two_pools("100 MB/s", "llama-3.2-1b")
    chain = chain_of("new", "old")
    recurrence, simulated = both(asked, chain)
    assert recurrence == pytest.approx(simulated, rel=0.2)
    untied = replace(asked, model=replace(asked.model, head=replace(asked.model.head, tied=False)))
    assert both(untied, chain)[0] < 0.8 * recurrence
    shared = both(asked, replace(chain, shard=1))[0]  # each copy sends its part
    assert shared < recurrence


def test_the_fewest_chips_that_share_the_way_of_the_gradients_decide():
    crossing = Crossing(two_pools("1 GB/s"))

    def seconds(*chains: Chain) -> float:
        return crossing.seconds(chains)

    wide, narrow = (chain_of("new", tp=tp, copies=4 // tp) for tp in (4, 1))
    other = chain_of("old", tp=4, copies=1)
    gradients = crossing.problem.model.num_parameters * 4.0
    assert seconds(wide, other) == pytest.approx(1.5 * gradients / 4 / 0.8e9, rel=1e-6)
    assert seconds(narrow, other) == seconds(wide, other)  # four chips of an island share it, too
    alone = replace(other, configs=(Config("old", tp=1),), copies=1)
    assert seconds(wide, alone) == pytest.approx(4 * seconds(wide, other))
    halves = chain_of("old", stages=2, tp=2, copies=1)
    assert seconds(halves, replace(wide, stages=(2,))) == pytest.approx(seconds(wide, other))
    assert seconds(wide, chain_of("new", tp=2)) == 0.0  # one pool: not between pools
    sharded = [replace(narrow, shard=2), replace(alone, shard=2, copies=4)]
    assert seconds(*sharded) == pytest.approx(seconds(wide, other))


def test_slow_links_are_known_before_anything_is_simulated():
    """Once seven times too low: every simulation went to strategies that wait for the network."""
    asked = make_problem("llama-3.2-1b", "leftovers", sequence_length=4096, global_batch=128)
    search = Search(Tables(asked), Effort())
    state = search.run()
    assert state.best is not None
    assert state.best.seconds < 1.0
    ratios = [ratio for key, ratio in search.corrections.items() if isinstance(key, tuple)]
    assert ratios
    assert all(0.5 < ratio < 2.0 for ratio in ratios)


@pytest.mark.parametrize("kind", list(ScheduleKind))
def test_every_kind_of_schedule_is_near_the_simulator(kind: ScheduleKind) -> None:
    virtual = 2 if schedule_record(kind).several_ranges else 1
    option = ScheduleOption(kind=kind, virtual=virtual)
    chain = replace(chain_of("new", "old", stages=2, tp=1), schedule=option)
    quick, simulated = both(replace(two_pools("10 GB/s"), unlimited_memory=True), chain)
    assert quick == pytest.approx(simulated, rel=0.05)
