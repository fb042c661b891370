"""`tutti train` as a user types it wrongly: each answer is one line, before a rank starts."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.support.launching import plan_of
from tests.support.train_job import TUTTI, Capture, tutti
from tutti.document import Place
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.plan.chips import ChipSet
from tutti.plan.files import save_plan
from tutti.plan.plan import Replica
from tutti.ranks.local_processes import free_port

SECRET = "what the ranks of a job know of each other"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian.yaml"], "trian.yaml: no such file; did you mean 'train.yaml'?"),
        ([], "name a training file, or --model (and --data), or --plan"),
        (["train.yaml", "--model", "modle"], "modle"),
        (["train.yaml", "--cluster", "labtop", "--set", "plan=null"], "did you mean 'laptop'?"),
        (["train.yaml", "--plan", "plam.json"], "did you mean 'plan.json'?"),
        (["train.yaml", "--model", "gpt2"], "the plan is for model 'model', but 'gpt2' has"),
        (["train.yaml", "--set", "optimizer.lr=1"], "tutti: options: optimizer: unknown key 'lr'"),
        (["train.yaml", "--steps", "0"], "steps"),
        (["train.yaml", "--data", "x.txt", "--set", "validation.every=1", "--set",
          "data.holdout=0"], "the data hold nothing out: name data.validation, or data.holdout"),
        (["train.yaml", "-o", "/proc/self"], "/proc/self/"),
        (["train.yaml", "-o", "train.yaml/out"], "output 'train.yaml/out': cannot be made"),
        (["train.yaml", "--model", "llama-3-70b", "--set", "plan=null", "--cluster", "laptop"],
         "does not fit"),
    ],
)  # fmt: skip
def test_wrong_words(here: Path, capsys: Capture, arguments: list[str], said: str) -> None:
    code, out, err = tutti(capsys, "train", *arguments)
    assert code == 2
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert said in err
    assert not (here / "out" / "logs").exists()


def test_chips_of_a_cluster_are_refused_at_once(here: Path, capsys: Capture) -> None:
    document = {"name": "big", "pools": [{"name": "a800", "chip": "A800", "nodes": 8}]}
    cluster = Cluster.from_document(document, Place("big"))
    spec = load_model("model")
    chips = [[Replica(chips=ChipSet.of("a800/0-7/0-7"), count=64)]]
    save_plan(plan_of(cluster, chips, spec), here / "big.json")
    code, _, err = tutti(capsys, "train", "train.yaml", "--plan", "big.json")
    assert code == 2
    assert "needs 64 chips like A800, this machine has none" in err
    assert "tutti launch" in err
    assert not (here / "out").exists()


def test_data_that_are_not_there_are_one_line(here: Path, capsys: Capture) -> None:
    code, out, err = tutti(capsys, "train", "train.yaml", "--data", "corpse/*.txt", "--json")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1, err
    assert "corpse/*.txt: no file matches" in err
    assert not (here / "out").exists()  # no rank was started for that


def test_a_port_in_use_is_one_line(here: Path, capsys: Capture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, _, err = tutti(capsys, "train", "train.yaml", "--port", port, "--json")
    assert code == 2
    assert err.startswith(f"tutti: --port {port}: ")
    assert not (here / "out" / "logs" / "rank-0.log").exists()


def test_nothing_to_resume_is_one_line(here: Path, capsys: Capture) -> None:
    code, _, err = tutti(capsys, "train", "train.yaml", "--resume", "--json")
    assert code == 2
    assert "holds no complete checkpoint to resume from" in err
    assert len(err.splitlines()) == 1, err
    assert not (here / "out").exists()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "3"}, "WORLD_SIZE is 3, but the plan has 2 ranks"),
        ({"WORLD_SIZE": "2"}, "after 3 s these ranks have not come: 1; were all processes started"),
    ],
)
def test_a_rank_without_the_others(here: Path, variables: dict[str, str], said: str) -> None:
    rank = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **variables}
    rank["TUTTI_SECRET"] = SECRET
    done = subprocess.run(
        [*TUTTI, "train", "train.yaml", "--set", "timeout_s=3"],
        env={**os.environ, **rank}, cwd=here, capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode in (1, 2)
    assert done.stderr.splitlines()[-1].startswith("tutti: ")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_ranks_of_two_minds_say_who_differs(here: Path) -> None:
    """As where one host has another version, file or plan."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place["TUTTI_SECRET"] = SECRET
    ranks = [
        subprocess.Popen(
            [*TUTTI, "train", "train.yaml", "--set", "timeout_s=120", "--set", f"seed={rank}"],
            env={**os.environ, **place, "RANK": str(rank)}, cwd=here, text=True,
            stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    said = [process.communicate(timeout=800)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [2, 2]
    assert "rank 1 has seed '1', rank 0 has '0'; start all ranks with the same files" in said[0]
    assert "rank 0 has seed '0', rank 1 has '1'; start all ranks with the same files" in said[1]
    assert "Traceback" not in "".join(said)
