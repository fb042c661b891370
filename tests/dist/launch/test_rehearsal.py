"""The generated files on two "nodes" of two ranks each, two pools, over real wires."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from tests.dist.launch.rehearsal import crossed_pair, files_of, run_files
from tests.dist.launch.stand_in import NUM_ELEMENTS
from tutti.bench.emulated_network import why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def ranks_left(folder: Path) -> list[psutil.Process]:
    """Return the processes that still run a plan of this folder."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(folder) in word for word in process.info["cmdline"] or ())
    ]


@pytest.mark.slow
def test_ranks_find_their_chips_and_each_other(tmp_path: Path) -> None:
    plan = crossed_pair()
    folder = tmp_path / "files"
    done = run_files(files_of(plan), folder)
    assert done.status == 0, done.output
    found = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(4)]
    assert [(f["node"], f["local_rank"]) for f in found] == [
        ("left/0", 0), ("right/0", 0), ("left/0", 1), ("right/0", 1),
    ]  # fmt: skip
    assert [f["chip"] for f in found] == [
        ["left", 0, 0], ["right", 0, 0], ["left", 0, 1], ["right", 0, 1],
    ]  # fmt: skip
    # torchrun numbers node by node, the plan stage by stage: they must have differed
    assert [f["torchrun_rank"] for f in found] == [0, 2, 1, 3]
    assert {f["smallest"] for f in found} == {f["largest"] for f in found} == {15.0}
    # the sum crossed the wire both ways
    assert min(done.sent_bytes["0/0"], done.sent_bytes["1/0"]) > 4 * NUM_ELEMENTS


@pytest.mark.slow
def test_hosts_with_different_numbers_of_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    done = run_files(files_of(crossed_pair(uneven=True)), folder)
    assert done.status == 0, done.output
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    assert [f["chip"] for f in found] == [["left", 0, 0], ["right", 0, 0], ["left", 0, 1]]
    assert [f["torchrun_rank"] for f in found] == [0, 2, 1]
    assert {f["largest"] for f in found} == {7.0}


@pytest.mark.slow
def test_a_rank_that_dies_ends_all(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    done = run_files(files_of(crossed_pair(), "--fail", "3"), folder)
    assert done.status == 1, done.output
    assert "run.sh: a host failed; ending the others" in done.output
    assert not list(folder.glob("rank-*.json"))
    _, alive = psutil.wait_procs(ranks_left(folder), timeout=20)
    assert not alive
