"""Elastic runs: ranks are killed, stopped and fail; the losses are those of an undisturbed run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.support.train_job import write_job
from tutti.elastic.journal import read_journal
from tutti.errors import TuttiError
from tutti.ownership.rectangles import Rectangle
from tutti.plan.files import load_plan
from tutti.schedule.instruction import Op
from tutti.schedule.schedule import build_schedule
from tutti.train.checkpoint.manifest import read_manifest
from tutti.train.checkpoint.storage import read_into, read_metadata
from tutti.train.run.config import TrainConfig, with_changes
from tutti.train.run.planning import prepare
from tutti.train.run.result import TrainResult
from tutti.train.run.trainer import run_local


@dataclass
class Runs:
    folder: Path

    def run(self, name: str, plan: str = "plan.json", **changes: Any) -> TrainResult:
        config = TrainConfig.load(self.folder / "train.yaml")
        given = {"output": str(self.folder / name), "plan": str(self.folder / plan), **changes}
        config = with_changes(config, {**given, "checkpoints.huggingface": False})
        return run_local(prepare(config))

    def again(self, name: str, plan: str, **changes: Any) -> TrainResult:
        """Go on from what a run has saved, without `elastic`."""
        config = TrainConfig.load(self.folder / "train.yaml")
        given = {"output": str(self.folder / name), "plan": str(self.folder / plan), **changes}
        config = with_changes(config, {**given, "checkpoints.huggingface": False})
        return run_local(prepare(config), resume=True)

    def entered(self, name: str) -> list[tuple[int, str]]:
        """Return step and source of every generation."""
        entries = read_journal(self.folder / name)
        return [(e.step or 0, e.source) for e in entries if e.phase == "entering"]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(write_job(tmp_path))


def state(result: TrainResult) -> dict[str, torch.Tensor]:
    """Return everything that a run's last checkpoint holds."""
    folder = result.checkpoint
    assert folder is not None
    stored = read_metadata(folder, read_manifest(folder).files)
    found, wanted = {}, {}
    for key, entry in stored.items():
        shape = tuple(entry.shape)
        memory = torch.empty(shape, dtype=entry.dtype)
        found[key] = memory
        wanted[key] = [(Rectangle((0,) * len(shape), shape), memory)]
    read_into(folder, stored, wanted)
    return found


def same(one: TrainResult, other: TrainResult) -> None:
    assert one.losses == other.losses
    ours, theirs = state(one), state(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def kill(rank: int, step: int, instruction: int, fault: str = "kill") -> dict[str, Any]:
    return {"fault": fault, "rank": rank, "step": step, "instruction": instruction}


def test_killed_ranks_are_replaced_and_nothing_changes(runs: Runs) -> None:
    """Two stages, no replica: the lost one's state comes from its copy in memory."""
    plain = runs.run("plain", steps=5)
    drills = [kill(1, 2, 9), kill(0, 4, 13)]
    result = runs.run("elastic", steps=5, elastic={"copies": 1, "drill": drills})
    same(result, plain)
    first, second, third = runs.entered("elastic")
    assert first == (0, "begin")
    # a copy is taken beside the next step: one killed early in it leaves the copy before
    assert second[0] <= 1
    assert (third[0] in (2, 3, 4), third[1]) == (True, "memory")
    causes = [e.why for e in read_journal(runs.folder / "elastic") if e.phase == "leaving"]
    assert causes == [
        "rank 1 (fast/0/1) was killed by SIGKILL",
        "rank 0 (fast/0/0) was killed by SIGKILL",
    ]
    lines = (runs.folder / "elastic" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 5
    assert not [p for p in psutil.Process().children(recursive=True) if p.is_running()
                and "fork_server" in " ".join(p.cmdline())]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["plan.json", "larger.json"])
def test_a_kill_between_any_two_instructions_of_the_steps_end_changes_nothing(
    runs: Runs, plan: str
) -> None:
    """With replicas there are no copies: the other one's live state is enough."""
    entries = build_schedule(load_plan(runs.folder / plan)).classes[0].instructions
    norm = next(i for i, entry in enumerate(entries) if entry.op is Op.CLIP_NORM)
    places = range(norm - 1, len(entries))
    steps = 2 * len(places) + 2
    drills = [kill(n % 2, 2 * n + 2, at) for n, at in enumerate(places)]
    plain = runs.run("plain", plan, steps=steps)
    copies = 1 if plan == "plan.json" else 0
    result = runs.run("elastic", plan, steps=steps, elastic={"copies": copies, "drill": drills})
    same(result, plain)
    entered = runs.entered("elastic")
    assert len(entered) == len(drills) + 1
    # what was killed goes on from the step before, or from that very one; one more is lost only
    # where the copy, which is over before the update, was not whole yet
    for (step, source), drill in zip(entered[1:], drills, strict=True):
        whole = not copies or drill["instruction"] > norm
        assert drill["step"] - (1 if whole else 2) <= step <= drill["step"]
        assert source == "memory" or not whole


@pytest.mark.slow
def test_without_copies_or_replicas_it_goes_on_from_the_checkpoint(runs: Runs) -> None:
    plain = runs.run("plain", steps=6)
    elastic = {"drill": [kill(1, 5, 4)]}
    result = runs.run("elastic", steps=6, elastic=elastic, **{"checkpoints.every": 2})
    assert result.losses == plain.losses
    assert runs.entered("elastic")[1] in [(4, "disk"), (2, "disk")]


@pytest.mark.slow
def test_a_fault_that_comes_back_three_times_ends_the_job_and_is_named(runs: Runs) -> None:
    drills = [kill(1, 2, 6)] * 3
    with pytest.raises(TuttiError, match=r"given up: 3 processes ended at step 2, instruction 6"):
        runs.run("elastic", "larger.json", steps=4, elastic={"drill": drills})


@pytest.mark.slow
def test_a_chip_that_fails_too_often_is_left_and_the_others_go_on(runs: Runs) -> None:
    """What is left of the plan runs, with the same samples; the state comes from who is left."""
    plain = runs.run("plain", "larger.json", steps=6)
    drills = [kill(1, 2, 4), kill(1, 4, 7)]
    elastic = {"restarts_per_hour": 1, "drill": drills}
    result = runs.run("elastic", "larger.json", steps=6, elastic=elastic)
    assert result.losses == pytest.approx(plain.losses, rel=1e-5)
    entries = [e for e in read_journal(runs.folder / "elastic") if e.phase == "entering"]
    assert [len(e.ranks) for e in entries] == [2, 2, 1]
    assert [(e.step, e.source) for e in entries[1:]] == [(1, "memory"), (3, "memory")]
    assert "1 chip failed too often: fast/0/1" in entries[-1].why


@pytest.mark.slow
def test_hangs_are_named_and_replaced(runs: Runs) -> None:
    plain = runs.run("plain", steps=8)
    drills = [kill(1, 3, 9, "stop"), kill(0, 5, 3, "sleep"), kill(1, 7, 4, "spin")]
    result = runs.run("elastic", steps=8, elastic={"copies": 1, "drill": drills})
    same(result, plain)
    causes = [e.why for e in read_journal(runs.folder / "elastic") if e.phase == "leaving"]
    assert [cause[:17] for cause in causes] == [
        "rank 1 (fast/0/1)", "rank 0 (fast/0/0)", "rank 1 (fast/0/1)",
    ]  # fmt: skip
    reasons = ("is stopped", "samples do not come", "interpreter")
    for cause, how in zip(causes, reasons, strict=True):
        assert how in cause


@pytest.mark.slow
def test_deaths_of_every_kind_are_named_and_replaced(runs: Runs) -> None:
    plain = runs.run("plain", steps=10)
    deaths = {
        "terminate": "was killed by SIGTERM", "segfault": "was killed by SIGSEGV",
        "abort": "was killed by SIGABRT", "exception": "failed: DrillError: drill: step 9",
    }  # fmt: skip
    drills = [kill(n % 2, 3 + 2 * n, 3 + n, fault) for n, fault in enumerate(deaths)]
    result = runs.run("elastic", steps=10, elastic={"copies": 1, "drill": drills})
    same(result, plain)
    entries = read_journal(runs.folder / "elastic")
    causes = [e.why for e in entries if e.phase == "settling" and e.generation]
    assert len(causes) == len(deaths)
    for n, (cause, how) in enumerate(zip(causes, deaths.values(), strict=True)):
        assert cause.startswith(f"rank {n % 2} (fast/0/{n % 2}) {how}")


@pytest.mark.slow
def test_adapters_get_their_base_again(runs: Runs) -> None:
    """What is frozen is in no copy: who gets its state from memory reads the base once more."""
    given = {"steps": 5, "tuning": {"adapter": {"rank": 4, "alpha": 8}}}
    plain = runs.run("plain", **given)
    drills = [kill(1, 3, 9)]
    result = runs.run("elastic", **given, elastic={"copies": 1, "drill": drills})
    assert result.losses == plain.losses
    assert runs.entered("elastic")[1][1] == "memory"


@pytest.mark.slow
def test_fewer_chips_than_wanted_save_and_give_up(runs: Runs) -> None:
    """One chip fails for good; the other holds everything, saves it, and the job ends."""
    plain = runs.run("plain", "larger.json", steps=6)
    drills = [kill(1, 2, 4), kill(1, 4, 7)]
    elastic = {"restarts_per_hour": 1, "min_chips": 2, "wait_s": 1.0, "drill": drills}
    words = r"given up: 1 chip left .*, elastic.min_chips is 2; checkpoint: .*step-"
    with pytest.raises(TuttiError, match=words):
        runs.run("elastic", "larger.json", steps=6, elastic=elastic)
    result = runs.again("elastic", "larger.json", steps=6)
    assert result.losses[-1] == pytest.approx(plain.losses[-1], rel=1e-5)
