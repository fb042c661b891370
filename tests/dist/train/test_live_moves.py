"""Any plan to any plan, live: bit for bit what the way over disk brings."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from tests.support.features import drawn_plans
from tests.support.live_moves import Moved, chips_of, move_one
from tests.support.rank_pool import RankPool
from tests.support.training import in_fp32
from tests.unit.train.checkpoint.test_any_plan import DENSE, SPARSE, of_job
from tutti.plan.plan import Plan
from tutti.search.replan.state_movement import movement

HANDMADE = {
    **{f"dense, {name}": of_job(plan, "fp32", batch=6) for name, plan in DENSE.items()},
    **{f"sparse, {name}": of_job(plan, "fp32", batch=4) for name, plan in SPARSE.items()},
}
SOME = [
    ("dense, levels 2 and 3, pipelines that shard inside", "dense, level 1, ragged"),
    ("sparse, experts over tensor and data parallel", "sparse, experts shared out unequally"),
]
NUM_PAIRS, PIECES = 100, 10  # a piece is a test, so that none takes long
CLOSE = 0.02  # of the bytes that are forecast
FEW_BYTES = 1024  # that rows which two shards share may add


def move(pool: RankPool, before: Plan, after: Plan, folder: Path) -> list[Moved]:
    size = len(chips_of(before, after))
    return pool.meet(move_one, size, before, after, folder, timeout_s=150.0)


def check(pool: RankPool, before: Plan, after: Plan, folder: Path) -> tuple[float, float]:
    """Move, compare with the way over disk; return the bytes that crossed, and the forecast."""
    found = move(pool, before, after, folder)
    for rank, one in enumerate(found):
        assert len(one.live) == len(one.disk)
        for (key, where, live), (_, _, disk) in zip(one.live, one.disk, strict=True):
            assert np.array_equal(live, disk), f"rank {rank}: {key} {where}"
    crossed = 4.0 * sum(found[0].numbers.values())
    spec, cluster = after.model.spec, after.cluster.cluster
    assert spec is not None
    assert cluster is not None
    return crossed, movement(before, after, spec, cluster).total_bytes


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("first", "second"), SOME)
def test_live_is_what_disk_brings(pool: RankPool, first: str, second: str, tmp_path: Path) -> None:
    crossed, forecast = check(pool, HANDMADE[first], HANDMADE[second], tmp_path)
    assert crossed == pytest.approx(forecast, rel=CLOSE)


def drawn_pairs(count: int) -> list[tuple[Plan, Plan]]:
    """Return random pairs of drawn plans for the same model on up to six ranks."""
    drawn = (in_fp32(plan, "adamw") for plan in drawn_plans(100, 6))
    plans = [*drawn, *HANDMADE.values()]
    by_model: dict[str, list[Plan]] = {}
    for plan in plans:
        if plan.num_ranks <= 6:
            by_model.setdefault(plan.model.hash, []).append(plan)
    pairs = [
        pair
        for alike in by_model.values()
        for pair in itertools.permutations(alike, 2)
        if pair[0].job.sequence_length == pair[1].job.sequence_length and len(chips_of(*pair)) <= 8
    ]
    random.Random(0).shuffle(pairs)
    return pairs[:count]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("piece", range(PIECES))
def test_a_hundred_pairs(pool: RankPool, piece: int, tmp_path: Path) -> None:
    failed, pairs = list[str](), drawn_pairs(NUM_PAIRS)
    assert len(pairs) == NUM_PAIRS
    crossed = forecast = 0.0
    for number in range(piece, NUM_PAIRS, PIECES):
        before, after = pairs[number]
        try:
            own, due = check(pool, before, after, tmp_path / str(number))
            crossed, forecast = crossed + own, forecast + due
            note = f"{own:,.0f} bytes, forecast {due:,.0f}"
            if own != pytest.approx(due, rel=CLOSE, abs=FEW_BYTES):
                failed.append(f"pair {number}: {note}")
        except Exception as error:
            note = f"{type(error).__name__}: {error}"
            failed.append(f"pair {number}: {note}")
        ranks = f"{before.num_ranks} → {after.num_ranks} ranks"
        print(f"pair {number}, {ranks}: {note}", flush=True)
    print(f"piece {piece}: {crossed:,.0f} bytes, forecast {forecast:,.0f}")
    assert not failed, "\n".join(failed)
    assert crossed == pytest.approx(forecast, rel=CLOSE)
