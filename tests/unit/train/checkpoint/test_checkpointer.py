"""Saving in the background, failing in one line, loading under another policy."""

from __future__ import annotations

import errno
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.any_plan import FOUR, PLAIN, Draft, level
from tests.support.checkpointing import Run, kept, run
from tests.support.plans import small_model
from tutti.errors import InputError, TuttiError
from tutti.plan.job import PRECISIONS
from tutti.plan.plan import Plan
from tutti.train.checkpoint import Alone, Checkpointer, CheckpointSettings, Progress, find_latest
from tutti.train.checkpoint import checkpointer as module
from tutti.train.checkpoint.contents import kept_pieces, written_pieces
from tutti.train.checkpoint.manifest import read_manifest

ASYNCHRONOUS = CheckpointSettings(keep_last=2)


def plan_of(precision: str = "bf16", optimizer: str = "adamw", ranks: int = 2) -> Plan:
    plan = Draft().line((FOUR, [{"count": ranks}])).plan(PLAIN, level(1))
    job = replace(plan.job, precision=PRECISIONS[precision], optimizer=optimizer)
    return replace(plan, job=job)


def test_a_save_in_the_background_keeps_the_moment_it_was_asked_at(tmp_path, monkeypatch):
    plan, go_on = plan_of(), threading.Event()
    write_part = module.write_part

    def slow(*args: Any) -> Any:
        assert go_on.wait(30)
        return write_part(*args)

    monkeypatch.setattr(module, "write_part", slow)

    def work(one: Run) -> Any:
        one.begin()
        one.train(1)
        expected = kept(one.engine)
        one.save()
        one.train(2)  # while the save is under way
        assert one.checkpointer.poll() is None
        assert find_latest(tmp_path) is None
        go_on.set()
        saved = one.checkpointer.wait()
        assert saved is not None
        assert (saved.step, saved.problem) == (1, "")
        assert saved.num_bytes > 0
        one.checkpointer.load(one.engine)
        assert one.engine.step_number == 1
        for (key, _, value), (_, _, before) in zip(kept(one.engine), expected, strict=True):
            assert torch.equal(value, before), key

    run(plan, tmp_path, work, settings=ASYNCHRONOUS)


def test_one_save_at_a_time_and_the_oldest_goes(tmp_path):
    def work(one: Run) -> None:
        one.begin()
        for _ in range(4):
            one.train(1)
            one.save()
        one.checkpointer.close()
        assert [saved.step for saved in one.checkpointer.history] == [1, 2, 3, 4]
        assert one.lines == []

    run(plan_of(), tmp_path, work, settings=ASYNCHRONOUS)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["latest", "step-000003", "step-000004"]


def fail_on_rank_1(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    write_part = module.write_part

    def failing(folder: Any, rank: int, pieces: Any) -> Any:
        if rank == 1 and f"step-{step:06}" in folder.name:
            raise OSError(errno.ENOSPC, "No space left on device", "file")
        return write_part(folder, rank, pieces)

    monkeypatch.setattr(module, "write_part", failing)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_save_that_fails_is_one_line_and_leaves_the_last_one(asynchronous, tmp_path, monkeypatch):
    fail_on_rank_1(monkeypatch, 2)

    def work(one: Run) -> list[str]:
        one.begin()
        for _ in range(3):
            one.train(1)
            one.save()
        one.checkpointer.close()
        assert [bool(saved.problem) for saved in one.checkpointer.history] == [False, True, False]
        return one.lines

    lines = run(plan_of(), tmp_path, work, settings=CheckpointSettings(asynchronous=asynchronous))
    expected = (
        "checkpoint of step 2 failed (rank 1: file: No space left on device); the last one is "
        "step-000001"
    )
    assert lines == [[expected], []]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-000001", "step-000003"]


def test_a_run_that_asks_for_it_is_stopped_by_a_failed_save(tmp_path, monkeypatch):
    fail_on_rank_1(monkeypatch, 1)

    def work(one: Run) -> None:
        one.begin()
        one.train(1)
        one.save()
        with pytest.raises(TuttiError, match=r"checkpoint of step 1 failed .* there is none yet"):
            one.checkpointer.wait()

    run(plan_of(), tmp_path, work, settings=CheckpointSettings(stop_on_failure=True))


@pytest.mark.parametrize(
    ("before", "after", "notes"),
    [
        ("fp32", "bf16", []),
        ("bf16", "fp32", []),
        (
            "bf16",
            "pure_bf16",
            [
                "checkpoint step-000001: weights saved as float32 are rounded to bfloat16 here",
                "checkpoint step-000001: means saved as float32 are rounded to bfloat16 here",
                "checkpoint step-000001: squares saved as float32 are rounded to bfloat16 here",
            ],
        ),
        (
            "pure_bf16",
            "fp32",
            [
                "checkpoint step-000001: weights saved as bfloat16 are widened to float32 here",
                "checkpoint step-000001: means saved as bfloat16 are widened to float32 here",
                "checkpoint step-000001: squares saved as bfloat16 are widened to float32 here",
            ],
        ),
    ],
)
def test_another_precision_is_converted_with_a_line(before, after, notes, tmp_path):
    def save(one: Run) -> Any:
        one.begin()
        one.train(1)
        one.save()
        return kept(one.engine)

    def load(one: Run) -> Any:
        one.checkpointer.load(one.engine)
        return kept(one.engine), one.lines

    saved, loaded = run(plan_of(before), tmp_path, save), run(plan_of(after), tmp_path, load)
    assert loaded[0][1] == notes
    for old, (new, _) in zip(saved, loaded, strict=True):
        for (key, _, one), (_, _, other) in zip(old, new, strict=True):
            assert torch.equal(one.to(other.dtype), other), key


def test_moments_that_were_not_saved_are_named_unless_they_may_begin_at_zero(tmp_path):
    def save(one: Run) -> None:
        one.begin()
        one.train(1)
        one.save()

    def load(one: Run) -> list[str]:
        one.checkpointer.load(one.engine)
        means = [state.optimizer.mean for state in one.engine.parameters.all_states()]
        assert not any(mean.any() for mean in means)
        return one.lines

    def refuse(one: Run) -> None:
        with pytest.raises(InputError, match=r"holds no means of .*saved under sgd.*missing=zero"):
            one.checkpointer.load(one.engine)

    run(plan_of(optimizer="sgd"), tmp_path, save)
    run(plan_of(), tmp_path, refuse)
    zero = CheckpointSettings(missing="zero")
    assert run(plan_of(), tmp_path, load, settings=zero)[0] == [
        "checkpoint step-000001: no means in it; they begin at zero",
        "checkpoint step-000001: no squares in it; they begin at zero",
    ]


def test_the_random_state_comes_back(tmp_path):
    def work(one: Run) -> None:
        one.begin()
        torch.manual_seed(5)
        torch.rand(3)
        one.save()
        expected = torch.rand(4)
        torch.manual_seed(6)
        one.checkpointer.load(one.engine)
        assert torch.equal(torch.rand(4), expected)

    run(plan_of(ranks=1), tmp_path, work)


def test_every_rank_hears_of_a_checkpoint_that_cannot_be_loaded(tmp_path):
    def save(one: Run) -> None:
        one.begin()
        one.save()

    run(plan_of(), tmp_path, save)
    other = Draft(3).line((((0, 5),), [{"count": 2}])).plan()

    def load(one: Run) -> None:
        with pytest.raises(InputError, match="'num_layers' is 2 there and 3 here"):
            one.checkpointer.load(one.engine)
        with pytest.raises(InputError, match="no such folder"):
            one.checkpointer.load(one.engine, tmp_path / "step-000009")

    run(other, tmp_path, load)


def test_what_is_written_is_what_is_kept_once_and_in_bounded_pieces(tmp_path):
    def work(one: Run) -> Any:
        one.begin()
        pieces = written_pieces(one.engine, most_bytes=1000)
        assert all(p.memory.nbytes <= 1000 or p.memory.numel() == 1 for p in pieces)
        assert all(p.memory.is_contiguous() for p in pieces)
        all_kept = sum(p.memory.numel() for p in kept_pieces(one.engine))
        return sum(p.memory.numel() for p in pieces), all_kept

    level_0 = Draft().line((FOUR, [{"count": 3}])).plan()
    counts = run(level_0, tmp_path, work)
    total = 3 * small_model(2).num_parameters
    assert sum(written for written, _ in counts) == total
    assert [all_kept for _, all_kept in counts] == [total] * 3
    written = [count for count, _ in counts]
    assert max(written) - min(written) <= 0.01 * total, "holders share the work equally"


def test_settings_that_keep_nothing_are_refused():
    with pytest.raises(InputError, match="must be at least 1"):
        CheckpointSettings(keep_last=0)


def test_alone_needs_no_torch_distributed(tmp_path):
    keeper = Checkpointer(tmp_path, CheckpointSettings(), Alone())
    assert keeper.wait() is None
    assert not torch.distributed.is_initialized()
    keeper.close()


def test_progress_and_job_are_in_the_manifest(tmp_path):
    def work(one: Run) -> None:
        one.begin()
        one.checkpointer.save(
            one.engine, Progress(step=12, samples=48, tokens=99, seed=3, data={"shard": [1, 7]})
        )

    plan = plan_of()
    run(plan, tmp_path, work)
    manifest = read_manifest(tmp_path / "step-000012")
    assert manifest.progress.data == {"shard": [1, 7]}
    assert (manifest.updates, manifest.world_size, manifest.optimizer) == (0, 2, "adamw")
    assert manifest.precision == plan.job.precision
    from tutti.plan.files import load_plan

    assert load_plan(tmp_path / "step-000012" / "plan.json") == plan
