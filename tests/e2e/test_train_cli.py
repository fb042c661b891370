"""`tutti train` as a user types it: two emulated chips, a tiny model, a few steps."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.support.train_job import TUTTI, Capture, tutti, write_job  # noqa: E402
from tests.support.warm_commands import REAL_START  # noqa: E402
from tutti.accelerator.operators import Operators  # noqa: E402
from tutti.huggingface import open_checkpoint  # noqa: E402
from tutti.launch.secret import SECRET, new_secret  # noqa: E402
from tutti.nn import Batch, Model, load  # noqa: E402
from tutti.ranks.local_processes import free_port  # noqa: E402

PARTS = ("compute_s", "communication_s", "bubble_s", "copy_s", "data_s", "other_s")


def trained(capsys: Capture, *arguments: str) -> dict[str, Any]:
    code, out, err = tutti(capsys, "train", "train.yaml", "--json", *arguments)
    assert code == 0, err
    assert err == ""  # with --json nothing is shown while it runs
    found: dict[str, Any] = json.loads(out)
    return found


def snapshot(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """Return the folder of a run that went to its end, and what it printed."""
    folder = write_job(tmp_path_factory.mktemp("whole"))
    changes = ["validation.every=2", "checkpoints.every=2"]
    words = [word for change in changes for word in ("--set", change)]
    done = subprocess.run(
        [*TUTTI, "train", "train.yaml", "--trace", "3", *words],
        cwd=folder, capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, done.stdout, done.stderr


def test_it_trains_and_says_so(whole: tuple[Path, str, str]) -> None:
    folder, out, err = whole
    assert out.splitlines()[0].startswith("4 steps, loss ")
    assert "Hugging Face folder: out/huggingface" in out
    assert "step 1 · loss" in err  # no terminal: lines
    assert "validation loss" in err
    figures = lines(folder / "out" / "metrics.jsonl")
    steps = [line for line in figures if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.1
    held_out = [line for line in figures if "validation_loss" in line]
    assert [line["step"] for line in held_out] == [2, 4]
    # what was held out comes after the step that it was taken after
    assert [line["step"] for line in figures] == [1, 2, 2, 3, 4, 4]
    assert [figures.index(line) for line in held_out] == [2, 5]
    assert held_out[1]["validation_loss"] < held_out[0]["validation_loss"]


def test_every_step_is_measured(whole: tuple[Path, str, str]) -> None:
    folder, _, _ = whole
    for line in lines(folder / "out" / "metrics.jsonl"):
        if "loss" not in line:
            continue
        (pool,) = line["pools"].values()
        assert pool["compute_s"] > 0
        assert all(pool[name] >= 0 for name in PARTS)
    trace = json.loads((folder / "out" / "trace-step-3.json").read_text(encoding="utf-8"))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == {0, 1}
    assert {"Forward", "BackwardInput", "Send", "Receive", "Step"} <= {e["name"] for e in slices}
    assert any(event["ph"] == "s" for event in trace["traceEvents"])  # arrows between ranks
    for rank in trace["otherData"]["ranks"]:  # a rank's parts add up to its own step
        spent = sum(rank["parts"][name] for name in PARTS)
        assert spent == pytest.approx(rank["step_s"], rel=1e-6)
    assert "one host's clock" in trace["otherData"]["clock"]
    (shared,) = trace["otherData"]["collectives"]  # of a step: two stages share its sums alone
    assert (shared["use"], shared["ranks"], shared["calls"]) == ("scalars", [0, 1], 1)


def test_a_run_is_shown_beside_its_prediction(
    whole: tuple[Path, str, str], tmp_path: Path, capsys: Capture
) -> None:
    output = whole[0] / "out"
    over, page = tmp_path / "over.html", tmp_path / "run.html"
    words = ("--over", str(output / "trace-step-3.json"), "--html", str(over))
    code, out, err = tutti(capsys, "simulate", str(output / "plan.json"), *words)
    assert code == 0, err
    assert "step 3, emulated" in out
    code, out, err = tutti(capsys, "report", f"first={output}", "--html", str(page))
    assert code == 0, err
    assert "emulated, overrun" in out
    assert "<svg" in page.read_text(encoding="utf-8")
    assert "rank 1" in over.read_text(encoding="utf-8")


def test_the_end_is_a_folder_that_transformers_loads(whole: tuple[Path, str, str]) -> None:
    transformers = pytest.importorskip("transformers")
    folder = whole[0] / "out" / "huggingface"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    checkpoint = open_checkpoint(folder)
    ours = Model(checkpoint.spec, Operators("cpu"))
    load(ours, checkpoint)
    tokens = torch.arange(40) % 259
    with torch.no_grad():
        theirs = model(tokens[None]).logits[0]
        torch.testing.assert_close(
            ours.logits(Batch.of(checkpoint.spec, tokens, [40])), theirs, rtol=1e-4, atol=1e-5
        )


def test_resumed_is_as_if_never_stopped(
    whole: tuple[Path, str, str], here: Path, capsys: Capture
) -> None:
    """From step 2, though there is a later checkpoint, and the figures go further."""
    shutil.copytree(whole[0] / "out", here / "out")
    before = lines(here / "out" / "metrics.jsonl")
    found = trained(capsys, "--resume", "2", "--set", "validation.every=2")
    assert found["finished"] is True
    losses = [line["loss"] for line in before if "loss" in line]
    assert found["losses"] == losses[2:]
    after = lines(here / "out" / "metrics.jsonl")

    def curve(figures: list[dict[str, Any]]) -> list[tuple[int, float]]:
        return [(x["step"], x.get("loss", x.get("validation_loss"))) for x in figures]

    assert sorted(curve(after)) == sorted(curve(before))


def test_nothing_left_to_do(whole: tuple[Path, str, str], here: Path, capsys: Capture) -> None:
    shutil.copytree(whole[0] / "out", here / "out")
    code, out, err = tutti(capsys, "train", "train.yaml", "--resume")
    assert code == 0, err
    assert out.splitlines()[0] == "nothing was left to do"
    assert "checkpoint: out/checkpoints/step-000004" in out


def test_an_earlier_run_is_destroyed_only_if_that_is_asked_for(
    whole: tuple[Path, str, str], here: Path, capsys: Capture
) -> None:
    shutil.copytree(whole[0] / "out", here / "out")
    before = snapshot(here / "out")
    code, out, err = tutti(capsys, "train", "train.yaml", "--steps", "1")
    assert (code, out) == (2, "")
    assert err == (
        "tutti: out: holds 2 checkpoints, figures and a Hugging Face folder of an earlier run; go "
        "on with it (--resume), begin anew over it (--overwrite), or name another --output\n"
    )
    assert snapshot(here / "out") == before
    code, _, err = tutti(capsys, "train", "train.yaml", "--steps", "1", "--overwrite")
    assert code == 0, err
    assert [line["step"] for line in lines(here / "out" / "metrics.jsonl")] == [1]
    assert not (here / "out" / "trace-step-3.json").exists()
    names = {path.name for path in (here / "out" / "checkpoints").iterdir()}
    assert names == {"latest", "step-000001"}


FULL_DISK = """
import errno, os, pathlib

def full(path, *args, **options):
    if path.name.endswith(".partial"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    return mkdir(path, *args, **options)

mkdir, pathlib.Path.mkdir = pathlib.Path.mkdir, full
"""


def test_a_last_save_that_fails_is_no_success(
    whole: tuple[Path, str, str], here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No folder can be made for a checkpoint, as on a full disk."""
    shutil.copytree(whole[0] / "out", here / "out")
    shutil.rmtree(here / "out" / "huggingface")
    (here / "full").mkdir()
    (here / "full" / "sitecustomize.py").write_text(FULL_DISK)
    earlier = os.environ.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, (str(here / "full"), earlier)))
    monkeypatch.setenv("PYTHONPATH", path)
    code, out, err = tutti(capsys, "train", "train.yaml", "--resume", "--steps", "5", "--json")
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1, err
    assert "checkpoint of step 5 failed (" in err
    assert "the last one is step-000004; mend it and go on with --resume" in err
    assert not (here / "out" / "huggingface").exists()


def test_one_job_at_a_time_and_none_after_a_kill(here: Path, capsys: Capture) -> None:
    """A second job in the folder is refused; after kill -9 the next goes on, without a hole."""
    command = [*TUTTI, "train", "train.yaml", "--steps", "4000", "--set", "checkpoints.every=1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        until_step(process)
        code, _, err = tutti(capsys, "train", "train.yaml", "--overwrite", "--json")
        assert code == 2
        assert f"another job writes there now (process {process.pid} of " in err
        assert len(err.splitlines()) == 1, err
        process.kill()
        process.wait(60)
    latest = (here / "out" / "checkpoints" / "latest").read_text().strip()
    reached = int(latest.removeprefix("step-"))
    found = trained(capsys, "--resume", "--steps", str(reached + 1))
    assert len(found["losses"]) == 1
    figures = lines(here / "out" / "metrics.jsonl")
    assert [line["step"] for line in figures] == list(range(1, reached + 2))


@pytest.mark.slow
def test_another_plan_goes_on_with_the_same_curve(here: Path, capsys: Capture) -> None:
    whole = trained(capsys, "-o", "whole")
    first = trained(capsys, "--steps", "2")
    code, _, err = tutti(
        capsys, "train", "train.yaml", "--resume", "--plan", "larger.json", "--json"
    )
    assert code == 2
    assert "the checkpoint's run had a global batch of 2, the plan has 4; go on" in err
    second = trained(capsys, "--resume", "--plan", "other.json")
    assert first["losses"] + second["losses"] == pytest.approx(whole["losses"], rel=1e-5)


def until_step(process: subprocess.Popen[str]) -> None:
    """Wait until a job shows its first step."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step "):
            return
    raise AssertionError("the job ended before its first step")


@pytest.mark.parametrize(
    ("whom", "number", "code"),
    [
        ("one rank", signal.SIGTERM, 143),
        pytest.param("the command", signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param("the command", signal.SIGINT, 130, marks=pytest.mark.slow),
    ],
)
def test_who_is_asked_to_stop_saves_and_is_not_done(
    here: Path, capsys: Capture, whom: str, number: signal.Signals, code: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv(REAL_START, "1")
    command = [*TUTTI, "train", "train.yaml", "--steps", "4000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        until_step(process)
        found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(found[1]) if whom == "one rank" else process.pid, number)
        said = process.stderr.read()
        assert process.wait() == code, said
    assert "asked to stop: saving at step" in said
    stopped = lines(here / "out" / "metrics.jsonl")[-1]["step"]
    how = "Ctrl-C" if number is signal.SIGINT else "SIGTERM"
    last = said.splitlines()[-1]
    assert last == f"tutti: stopped by {how} after step {stopped}; saved; go on with --resume"
    monkeypatch.delenv(REAL_START)
    found = trained(capsys, "--resume", "--steps", str(stopped + 1))
    assert len(found["losses"]) == 1
    assert found["steps"] == stopped + 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--resume", "3"], "holds no checkpoint of step 3; there are 2, 4"),
        (["--resume=3"], "holds no checkpoint of step 3; there are 2, 4"),
        (["--resume=last"], "--resume last: write the step of a checkpoint, or --resume alone"),
        (["--resume", "--overwrite"], "choose one"),
        (["--resume", "--plan", "larger.json"], "had a global batch of 2, the plan has 4"),
    ],
)
def test_a_step_to_resume_from(
    whole: tuple[Path, str, str], here: Path, capsys: Capture, words: list[str], said: str
) -> None:
    shutil.copytree(whole[0] / "out", here / "out")
    shutil.rmtree(here / "out" / "logs")
    code, _, err = tutti(capsys, "train", *words, "train.yaml")
    assert code == 2
    assert said in err
    assert len(err.splitlines()) == 1, err
    assert not (here / "out" / "logs").exists()


@pytest.mark.slow
def test_a_launched_job_that_is_asked_to_stop_is_started_again_and_goes_on(here: Path) -> None:
    """SIGTERM to one rank ends both with 143; the restart needs no --resume."""

    def ranks(steps: int, attempt: int) -> list[subprocess.Popen[str]]:
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        place |= {SECRET: new_secret(), "TUTTI_ATTEMPT": str(attempt)}
        return [
            subprocess.Popen(
                [*TUTTI, "train", "train.yaml", "--steps", str(steps)],
                env={**os.environ, **place, "RANK": str(rank)},
                cwd=here, text=True, stderr=subprocess.PIPE,
            )
            for rank in (0, 1)
        ]  # fmt: skip

    first = ranks(4000, 0)
    until_step(first[0])
    first[1].send_signal(signal.SIGTERM)
    said = [process.communicate(timeout=300)[1] for process in first]
    assert [process.returncode for process in first] == [143, 143], said
    assert "tutti: stopped by SIGTERM after step " in said[0]
    stopped = lines(here / "out" / "metrics.jsonl")[-1]["step"]
    again = ranks(stopped + 1, 1)
    said = [process.communicate(timeout=300)[1] for process in again]
    assert [process.returncode for process in again] == [0, 0], said
    assert "reading the checkpoint" in said[0]
    refused = ranks(stopped + 1, 0)  # typed once more by hand
    said = [process.communicate(timeout=300)[1] for process in refused]
    assert [process.returncode for process in refused] == [2, 2], said
    assert "out: holds 2 checkpoints, figures and a Hugging Face folder of an earlier" in said[0]
    assert said[1].splitlines()[-1].startswith("tutti: rank 0: out: holds")
