"""The engine's links over processes: programs, sums, bits, and ranks that are lost."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
import torch

from tests.dist.train.jobs import chosen, doomed, refused, sums, swapped, too_few
from tests.support.any_plan import PLANS
from tests.support.rank_pool import RankPool
from tests.support.rank_training import train_processes
from tutti.plan.plan import CollectiveChoice

THREE = PLANS["pipelines that cut differently"]  # a pipeline of two and one of one stage
EXPERTS = PLANS["experts over tensor and data parallel"]  # 4 ranks


# --- programs and sums ---------------------------------------------------------------------


def test_sixteen_bit_gradients_are_added_up_in_float32(pool: RankPool) -> None:
    due = float(torch.tensor(1 + 3 * 2.0**-8, dtype=torch.bfloat16))
    assert due != 1.0
    assert pool.meet(sums, 4, EXPERTS) == [[due, due]] * 4


def test_the_plans_programs_are_obeyed(pool: RankPool) -> None:
    plan = replace(
        EXPERTS,
        collectives=(
            CollectiveChoice(
                use="gradients", operation="all_reduce", algorithm="tree", max_bytes=1 << 20
            ),
            CollectiveChoice(use="gradients", operation="all_reduce", algorithm="double_tree"),
            CollectiveChoice(use="parameters", operation="all_gather", algorithm="direct"),
        ),
    )
    ours, silent = (pool.meet(chosen, 4, p) for p in (plan, EXPERTS))
    assert ours == [ours[0]] * 4
    assert silent == [silent[0]] * 4
    assert ours[0][:2] == ["tree", "double_tree"]
    assert ours[0][8:10] == ["direct", "direct"]
    told = {0, 1, 8, 9}
    assert [p for i, p in enumerate(ours[0]) if i not in told] == [
        p for i, p in enumerate(silent[0]) if i not in told
    ]


@pytest.mark.parametrize("algorithm", ["", "native", "direct"])
def test_rows_of_experts_arrive_by_any_program(pool: RankPool, algorithm: str) -> None:
    choices = (CollectiveChoice(use="experts", operation="all_to_all", algorithm=algorithm),)
    plan = replace(EXPERTS, collectives=choices if algorithm else ())
    for rank, found in enumerate(pool.meet(swapped, 4, plan)):
        due = [[10.0 * s + rank] * 2 for s in range(4) for _ in range((s + rank) % 3)]
        assert found == due


def test_a_recorded_program_that_cannot_run_is_refused_before_the_step(pool: RankPool) -> None:
    choice = CollectiveChoice(use="gradients", operation="all_reduce", algorithm="hierarchical")
    said = pool.meet(refused, 4, replace(EXPERTS, collectives=(choice,)))
    assert said == [said[0]] * 4
    assert said[0].startswith("plan: collectives: gradients all_reduce among ")
    assert "'hierarchical', which needs several islands" in said[0]
    assert "\n" not in said[0]


def test_another_number_of_ranks_is_refused(pool: RankPool) -> None:
    assert pool.meet(too_few, 1, EXPERTS)[0].startswith("the plan is for 4 ranks, the job has 1")


def test_the_same_plan_gives_the_same_bits(pool: RankPool) -> None:
    (one,), (other,) = (train_processes(pool, EXPERTS, ("adamw",)) for _ in range(2))
    assert one.losses == other.losses
    assert one.norms == other.norms
    assert all(torch.equal(value, other.weights[name]) for name, value in one.weights.items())


# --- ranks that are lost -------------------------------------------------------------------


def check_loss(how: int, timeout_s: float) -> None:
    victim, size = 2, THREE.num_ranks
    pool = RankPool(size)
    try:
        pool.start(doomed, range(size), pool.port, "doomed", THREE, victim, how, timeout_s)
        for rank in set(range(size)) - {victim}:
            peer, text, seconds = pool.answer(rank, 120.0)
            assert peer == victim, f"rank {rank}: {text}"
            assert f"rank {victim}" in text
            assert seconds < 1.5 * timeout_s
    finally:
        pool.close()


def test_a_rank_killed_in_mid_step_is_named_by_all_others() -> None:
    check_loss(signal.SIGKILL, timeout_s=30.0)  # its connections break: nobody waits so long


@pytest.mark.slow
def test_a_rank_stopped_in_mid_step_is_named_by_all_others() -> None:
    check_loss(signal.SIGSTOP, timeout_s=15.0)
