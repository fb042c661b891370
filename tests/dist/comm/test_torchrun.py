"""`tutti bench comm` as ranks of a job that torchrun started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.rank_pool import RankPool
from tutti.bench.collective_ranks import Outcome, bench_under_torchrun
from tutti.bench.collectives import Options
from tutti.hardware.profile import Profile


def as_torchrun_starts_it(rank: int, world: int, port: int, judge: bool) -> Outcome:
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TUTTI_SECRET": "known to these ranks alone, and long enough",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there: nobody has to start it
    }
    os.environ.update(environment)
    try:
        options = Options(
            operations=("all_reduce", "all_gather"), sizes=(8192,), repeats=1, all_programs=judge
        )
        return bench_under_torchrun(options, judge=judge)
    finally:
        for name in environment:
            del os.environ[name]


@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_finds_the_same(world: int) -> None:
    pool = RankPool(world)
    try:
        found = pool.run(as_torchrun_starts_it, range(world), world, pool.port, world == 2)
    finally:
        pool.close()
    assert all(one == found[0] for one in found)
    rows = [(row.operation, row.algorithm == "gloo") for row in found[0].rows]
    assert {("all_reduce", False), ("all_reduce", True), ("all_gather", True)} <= set(rows)
    assert all(row.seconds > 0 and row.ranks == world for row in found[0].rows)
    assert [link.kind for link in found[0].links] == ["comm island"]
    assert set(found[0].regrets) == ({"table", "links"} if world == 2 else set())
    assert all(value >= 0 for values in found[0].regrets.values() for value in values)


def _bench(*options: str) -> str:
    command = ["--nproc-per-node", "2", "--no-python", "tutti", "bench", "comm", *options]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_command_under_torchrun(tmp_path: Path) -> None:
    file = tmp_path / "tuned.yaml"
    short = ("--sizes", "64K", "--repeats", "1", "--json")
    value = json.loads(_bench(*short, "--tune", str(file)))
    assert value["where"] == "2 ranks, tensors on cpu"
    assert {row["program"] for row in value["rows"]} >= {"direct/1", "ring/1", "gloo"}
    assert Profile.load(file).collectives
    again = json.loads(_bench(*short, "--profile", str(file), "--no-gloo"))
    assert [row["chosen"] for row in again["rows"]] == [True]
