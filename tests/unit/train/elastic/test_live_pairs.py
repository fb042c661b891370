"""Any plan to any plan, live, with ranks as threads: the bits that the way over disk brings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.dist.train.test_live_moves import CLOSE, HANDMADE, NUM_PAIRS, drawn_pairs
from tests.support.any_plan import FOUR, PLAIN, Draft, level
from tests.support.live_moves_threads import move_all
from tests.unit.train.checkpoint.test_any_plan import of_job
from tutti.plan.job import PRECISIONS
from tutti.plan.plan import Plan
from tutti.search.replan.state_movement import movement


def apart(owner: int) -> Plan:
    """Two pipelines; the first has a tied tensor at its two ends, the second in one rank, twice."""
    plan = (
        Draft(tied=True)
        .line((((0, 2),), [{"sequences": 3}]), (((2, 4),), [{"sequences": 3}]), micro_batches=1)
        .line((FOUR, [{"sequences": 3}]), micro_batches=1)
        .plan(PLAIN, level(2))
    )
    return replace(of_job(plan, "fp32"), tied_owner=owner)


TWICE = {f"tied apart, owned by {owner}": apart(owner) for owner in (0, 3)}
ALL = {**HANDMADE, **TWICE}
SOME = [
    ("dense, one chip", "tied apart, owned by 3"),
    ("tied apart, owned by 3", "tied apart, owned by 0"),
    ("tied apart, owned by 0", "dense, levels 2 and 3, pipelines that shard inside"),
    ("dense, interleaved, owned by the head", "tied apart, owned by 3"),
    ("sparse, one chip", "sparse, experts shared out unequally"),
]


def check(before: Plan, after: Plan, folder: Path) -> tuple[float, float]:
    """Move and compare; return the bytes that crossed, and the forecast."""
    found = move_all(before, after, folder)
    for rank, one in enumerate(found):
        assert len(one.live) == len(one.disk)
        for (key, where, live), (_, _, disk) in zip(one.live, one.disk, strict=True):
            assert torch.equal(live, disk), f"rank {rank}: {key} {where}"
    spec, cluster = after.model.spec, after.cluster.cluster
    assert spec is not None
    assert cluster is not None
    crossed = sum(one.numbers["bytes"] for one in found)
    return crossed, movement(before, after, spec, cluster).total_bytes


@pytest.mark.parametrize(("first", "second"), SOME)
def test_live_is_what_disk_brings(first: str, second: str, tmp_path: Path) -> None:
    crossed, forecast = check(ALL[first], ALL[second], tmp_path)
    assert crossed == pytest.approx(forecast, rel=CLOSE)


def test_masters_come_where_only_weights_to_compute_with_are_kept(tmp_path: Path) -> None:
    """A tied copy has no master; whoever owns the tensor gives its own."""

    def narrow(plan: Plan) -> Plan:
        return replace(plan, job=replace(plan.job, precision=PRECISIONS["bf16"]))

    crossed, _ = check(narrow(apart(3)), narrow(apart(0)), tmp_path)
    assert crossed > 0  # `check` holds what came against the way over disk, bit by bit


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_pairs(tmp_path: Path) -> None:
    """The pairs of the test with processes, in a hundredth of its time."""
    failed, pairs = list[str](), drawn_pairs(NUM_PAIRS)
    assert len(pairs) == NUM_PAIRS
    for number, (before, after) in enumerate(pairs):
        try:
            own, due = check(before, after, tmp_path / str(number))
            note = f"{own:,.0f} bytes, forecast {due:,.0f}"
            if own != pytest.approx(due, rel=CLOSE):
                failed.append(f"pair {number}: {note}")
        except Exception as error:
            note = f"{type(error).__name__}: {error}"
            failed.append(f"pair {number}: {note}")
        print(f"pair {number}, {before.num_ranks} → {after.num_ranks} ranks: {note}", flush=True)
    assert not failed, "\n".join(failed)
