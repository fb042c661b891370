"""Ranks that restore from a URL: they read for each other, get the same bits, and fail together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.any_plan import FOUR, PLAIN, Draft, level
from tests.support.checkpointing import Run, kept, run
from tests.support.rank_pool import RankPool
from tests.support.rank_training import joined
from tests.support.training import in_fp32
from tutti.accelerator import open_accelerator
from tutti.bench.storage.object_server import ObjectServer
from tutti.errors import TuttiError
from tutti.plan.plan import Plan
from tutti.storage import url as urls
from tutti.train.checkpoint import Checkpointer, CheckpointSettings, Processes
from tutti.train.checkpoint.remote import RemoteRun
from tutti.train.engine.engine import Engine
from tutti.train.sync.comm_links import CommLinks


def plan_of(ranks: int, shard: int = 0) -> Plan:
    draft = Draft(length=16).line((FOUR, [{"count": ranks}]))
    return in_fp32(draft.plan(PLAIN, level(shard)), "adamw")


def restore_one(
    rank: int, port: int, job: str, plan: Plan, folder: Path, settings: CheckpointSettings
) -> tuple[str, int, list[Any]]:
    """Restore as one rank; return what went wrong, the bytes read, and what the rank keeps."""
    urls._PAUSE_S = 0.01
    spec = plan.model.spec
    assert spec is not None
    comm = joined(rank, port, job, plan.num_ranks)
    links = CommLinks(comm, plan, spec)
    engine = Engine(plan, spec, rank, open_accelerator("cpu"), links, clip_norm=1.0)
    keeper = Checkpointer(folder, settings, Processes(comm))
    problem = ""
    try:
        keeper.load(engine)
    except TuttiError as error:
        problem = str(error)
    comm.barrier().wait()
    comm.close()
    return problem, keeper.read_bytes, [(k, s, v.numpy()) for k, s, v in kept(engine)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], int]:
    """A store with a checkpoint, what was saved, and the bytes of the rank's file."""
    base = tmp_path_factory.mktemp("store")
    saved: dict[str, Any] = {}

    def work(one: Run) -> None:
        one.begin()
        one.train(1)
        saved.update({f"{k} {s}": v for k, s, v in kept(one.engine)})
        one.save()

    settings = CheckpointSettings(asynchronous=False, to=f"file://{base}/store")
    run(plan_of(1), base / "run", work, settings=settings)
    remote = RemoteRun(f"file://{base}/store")
    manifest = remote.manifest(remote.newest_first()[0])
    return base / "store", saved, manifest.files["__0_0.distcp"].num_bytes


def test_replicas_read_every_byte_once_and_get_the_same_bits(
    pool: RankPool, store: tuple[Path, dict[str, Any], int], tmp_path: Path
) -> None:
    folder, saved, num_bytes = store
    read = {}
    with ObjectServer(folder) as server:
        for way in ("each", "broadcast"):
            settings = CheckpointSettings(to=server.url, restore=way)  # type: ignore[arg-type]
            before = server.sent
            found = pool.meet(restore_one, 4, plan_of(4), tmp_path / way, settings)
            read[way] = server.sent - before
            for problem, _, state in found:
                assert not problem
                for key, cut, value in state:
                    assert (saved[f"{key} {cut}"].numpy() == value).all(), key
            total = sum(count for _, count, _ in found)
            assert total == num_bytes * (4 if way == "each" else 1)
            if way == "broadcast":
                assert max(count for _, count, _ in found) < num_bytes / 2
    assert read["each"] - read["broadcast"] > 2.9 * num_bytes  # what the server says of it


def test_parts_that_nobody_shares_are_read_by_their_ranks(
    pool: RankPool, store: tuple[Path, dict[str, Any], int], tmp_path: Path
) -> None:
    """Under shards that differ, every rank still fills exactly what it keeps."""
    folder, saved, _ = store
    plan = plan_of(3, shard=1)
    with ObjectServer(folder) as server:
        settings = CheckpointSettings(to=server.url)
        found = pool.meet(restore_one, 3, plan, tmp_path, settings)
    whole = {key.partition(" ")[0]: value for key, value in saved.items()}
    for problem, _, state in found:
        assert not problem
        for key, cut, value in state:
            assert (whole[key][cut].numpy() == value).all(), key


def test_a_rank_that_cannot_read_keeps_nobody_waiting(
    pool: RankPool, store: tuple[Path, dict[str, Any], int], tmp_path: Path
) -> None:
    folder, _, _ = store
    with ObjectServer(folder) as server:
        server.refuse_ranges = True
        settings = CheckpointSettings(to=server.url, restore="broadcast")
        found = pool.meet(restore_one, 4, plan_of(4), tmp_path, settings)
    for problem, _, _ in found:
        assert len(problem.splitlines()) == 1
        assert "__0_0.distcp" in problem
