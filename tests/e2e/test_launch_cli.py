"""`tutti launch` as a user types it, clumsy first attempts included."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support.launching import IMAGES, crossed_plan
from tutti.cli.main import run
from tutti.files import write_text
from tutti.plan.files import load_plan, plan_to_document, save_plan

TRAIN = "model: small\ndata: {train: [{kind: synthetic}]}\nsteps: 10\n"
Capture = pytest.CaptureFixture[str]


def tutti(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        run(arguments)
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a plan, a configuration and launch facts, in which commands are typed."""
    monkeypatch.chdir(tmp_path)
    save_plan(crossed_plan(), tmp_path / "plan.json")
    (tmp_path / "train.yaml").write_text(TRAIN)
    (tmp_path / "launch.yaml").write_text(yaml.safe_dump({"name": "mixed", "pools": IMAGES}))
    return tmp_path


@pytest.mark.parametrize(
    ("target", "files", "following"),
    [
        (
            "torchrun",
            ["commands.txt", "plan.json", "secret", "start.sh", "train.yaml"],
            "commands.txt",
        ),
        (
            "slurm",
            ["job.sbatch", "plan.json", "secret", "start.sh", "train.yaml"],
            "sbatch job.sbatch",
        ),
        ("kubernetes", ["inputs.yaml", "jobset.yaml", "secret.yaml"], "kubectl apply -f"),
    ],
)
def test_files_are_written_and_the_next_command_is_said(
    target: str, files: list[str], following: str, here: Path, capsys: Capture
) -> None:
    arguments = ["launch", "plan.json", "--to", target, "--config", "train.yaml"]
    arguments += ["--with", "launch.yaml", "-o", "files"]
    code, out, err = tutti(capsys, *arguments)
    assert code == 0, err
    assert sorted(os.listdir("files")) == files
    assert out.splitlines()[0] == "a100: 1 host × 8 A100-80, 8 ranks"
    assert out.splitlines()[-1].startswith("next: ")
    assert following in out.splitlines()[-1]
    before = {name: Path("files", name).stat().st_mtime_ns for name in files}
    secret = Path("files", "secret.yaml" if target == "kubernetes" else "secret")
    assert secret.stat().st_mode & 0o777 == 0o600
    text = secret.read_text()
    word = yaml.safe_load(text)["stringData"]["secret"] if target == "kubernetes" else text.strip()
    assert len(word) == 64
    others = [Path("files", name).read_text() for name in files if Path("files", name) != secret]
    assert not any(word in other for other in others)

    code, out, err = tutti(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err == (
        f"tutti: files: {files[0]} and {len(files) - 1} more would be overwritten; "
        "choose another folder, or --force\n"
    )
    assert before == {name: Path("files", name).stat().st_mtime_ns for name in files}

    code, out, err = tutti(capsys, *arguments, "--force", "--json")
    assert code == 0, err
    answer = json.loads(out)
    assert answer["files"] == [f"files/{name}" for name in files]
    assert [host["node"] for host in answer["hosts"]] == ["a100/1", "h100/0", "a100/0", "p800/0"]
    assert answer["hosts"][1]["ranks"] == [8, 9, 24, 25]
    assert word not in secret.read_text()  # files that are written again are of another job
    assert ("tutti-shared" in str(answer["notes"])) == (target == "kubernetes")
    assert sorted(os.listdir(".")) == ["files", "launch.yaml", "plan.json", "train.yaml"]


def test_nothing_half_written_stays(here: Path, capsys: Capture) -> None:
    Path("files").mkdir()
    Path("files/start.sh").mkdir()  # a file cannot take its place
    code, _, err = tutti(capsys, "launch", "plan.json", "--to", "slurm", "-o", "files", "--force")
    assert code == 2
    assert err == "tutti: files: start.sh is a folder there; choose another one\n"
    assert os.listdir("files") == ["start.sh"]
    assert not [name for name in os.listdir(".") if name.startswith(".")]


def test_a_full_disk_leaves_the_old_files(
    here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["launch", "plan.json", "--to", "slurm", "-o", "files"]
    assert tutti(capsys, *arguments)[0] == 0
    before = {path: path.read_text() for path in Path("files").iterdir()}
    monkeypatch.setattr("tutti.launch.targets.write_text", full_after(2))
    code, _, err = tutti(capsys, *arguments, "--force", "--", "--seed", "3")
    assert code == 2
    assert "No space left" in err
    assert before == {path: path.read_text() for path in Path("files").iterdir()}
    assert not [name for name in os.listdir(".") if name.startswith(".")]


def full_after(writes: int) -> Callable[[Path, str], None]:
    left = [writes]

    def write(path: Path, text: str) -> None:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= 1
        write_text(path, text)

    return write


def test_local_prints_the_command(here: Path, capsys: Capture) -> None:
    code, out, err = tutti(
        capsys, "launch", "plan.json", "--config", "train.yaml", "--", "--seed", "3"
    )
    assert code == 0
    assert out.endswith(" tutti train train.yaml --plan plan.json --seed 3\n")
    assert "torchrun" not in out  # whose rendezvous would be open to every network
    assert "TUTTI_NODE" not in out
    assert "the plan has 4 hosts; here all 26 ranks share this machine" in err
    code, out, _ = tutti(capsys, "launch", "plan.json", "--to", "local", "--json")
    assert json.loads(out)["command"][-2:] == ["--plan", "plan.json"]
    assert not Path("launch").exists()


def test_local_runs_the_command(here: Path) -> None:
    """As a process of its own, for --run becomes the command."""
    plan = plan_to_document(crossed_plan())
    plan["pipelines"] = [  # type: ignore[index]
        {
            "micro_batch": 1,
            "micro_batches": 2,
            "stages": [{"units": [[0, 6]], "replicas": [{"chips": "h100/0/4-5", "tp": 2}]}],
        }
    ]
    plan["job"] = {"sequence_length": 64, "global_batch": 2}
    plan.pop("idle"), plan.pop("spare")
    Path("one.json").write_text(json.dumps(plan))
    Path("show.sh").write_text('echo "$0 $* with $OMP_NUM_THREADS and $MINE"')
    facts = {"command": ["bash", "show.sh"], "pools": {"h100": {"environment": {"MINE": "x"}}}}
    Path("launch.yaml").write_text(yaml.safe_dump(facts))
    done = subprocess.run(
        [sys.executable, "-m", "tutti.cli.main", "launch", "one.json", "--run",
         "--with", "launch.yaml"],
        capture_output=True, text=True, timeout=60, env={**os.environ, "TUTTI_DEVICE": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"show.sh --plan one.json with \d+ and x", done.stdout.splitlines()[-1])


def test_local_is_refused_where_the_chips_are_not(
    here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TUTTI_DEVICE", raising=False)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    code, out, err = tutti(capsys, "launch", "plan.json", "--run")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "the plan needs 18 chips like A100-80, this machine has" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan.json", "--to", "slrum"], "--to: 'slrum'; did you mean 'slurm'?"),
        (["plan.json", "--to", "slurm", "--run"], "--run: goes with --to local only"),
        (["plam.json"], "plam.json: no such file; did you mean 'plan.json'?"),
        (["plan.json", "--config", "none.yaml"], "none.yaml: no such file"),
        (["plan.json", "--config", "list.yaml"], "list.yaml: expected a mapping"),
        (["plan.json", "--config", "launch.yaml"], "launch.yaml: unknown key 'name'"),
        (["plan.json", "--with", "train.yaml"], "train.yaml: unknown key 'model'"),
        (["plan.json", "--to", "kubernetes"], "pool 'a100' has no 'image'"),
        (
            ["plan.json", "--to", "slurm", "-o", "train.yaml"],
            "train.yaml: is a file; name a folder",
        ),
        (["plan.json", "--to", "slurm", "-o", "no/where"], "no/where: cannot be written (No such"),
        (["plan.json", "--cluster", "laptop"], "no pool 'a100'"),
    ],
)
def test_mistakes_are_answered_in_one_line(
    arguments: list[str], said: str, here: Path, capsys: Capture
) -> None:
    Path("list.yaml").write_text("- 1\n")
    code, out, err = tutti(capsys, "launch", *arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert said in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TRAIN.replace("small", "models/small"), "'model' is 'models/small', seen from where"),
        (
            TRAIN.replace("kind: synthetic", "path: corpus"),
            "'data.train[0]' is 'corpus', seen from where the file lies; it travels to other",
        ),
    ],
)
def test_paths_that_no_other_host_knows(text: str, said: str, here: Path, capsys: Capture) -> None:
    Path("models/small").mkdir(parents=True)
    Path("train.yaml").write_text(text)
    arguments = ["launch", "plan.json", "--config", "train.yaml"]
    assert tutti(capsys, *arguments, "--to", "local")[0] == 0
    code, _, err = tutti(capsys, *arguments, "--to", "slurm")
    assert code == 2
    assert said in err
    whole = text.replace("models/small", "/shared/models/small").replace("corpus", "/shared/corpus")
    Path("train.yaml").write_text(whole)
    code, _, err = tutti(capsys, *arguments, "--to", "slurm")
    assert code == 0, err
    assert Path("launch/train.yaml").read_text() == whole


def test_what_a_plan_does_not_embed_is_given(here: Path, capsys: Capture) -> None:
    arguments = ["plan", "llama-3.2-1b", "small-mixed", "--uniform", "tp=2,pp=4"]
    assert tutti(capsys, *arguments, "-o", "uniform.json")[0] == 0
    document = json.loads(Path("uniform.json").read_text())
    document["cluster"].pop("cluster")
    Path("bare.json").write_text(json.dumps(document))
    code, _, err = tutti(capsys, "launch", "bare.json", "--to", "slurm")
    assert code == 2
    assert "the cluster 'small-mixed' is not embedded" in err
    code, _, err = tutti(
        capsys, "launch", "bare.json", "--to", "slurm", "--cluster", "small-mixed", "-o", "files"
    )
    assert code == 0, err
    assert load_plan(Path("files/plan.json")) == load_plan(Path("uniform.json"))


def test_no_torch_is_imported(here: Path) -> None:
    code = (
        "import sys; from tutti.cli.main import run\n"
        "try: run(['launch', 'plan.json', '--to', 'slurm'])\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False", done.stderr
