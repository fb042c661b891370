"""Launch files with `elastic: true`: agents in torchrun's place."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from tests.support.launching import crossed_job, crossed_plan, facts_of
from tests.unit.launch.schemas import (
    SRUN,
    directives,
    replicated_jobs,
    require_kubernetes,
    require_option,
    require_shell,
)
from tutti.errors import InputError
from tutti.launch.job import Job
from tutti.launch.kubernetes import kubernetes_files
from tutti.launch.slurm import slurm_files
from tutti.launch.targets import write_folder
from tutti.launch.torchrun import torchrun_files

HOSTS = {"h100": ["n1"], "a100": ["o1", "o2"], "p800": ["k1"]}
NAMED = {"pools": {pool: {"image": "i", "hosts": names} for pool, names in HOSTS.items()}}


@pytest.mark.parametrize("facts", [{}, NAMED], ids=["any hosts", "named"])
def test_a_job_of_slurm_survives_its_hosts(facts: dict[str, object], tmp_path: Path) -> None:
    files = slurm_files(crossed_job(elastic=True, **facts))
    for name in ("job.sbatch", "start.sh"):
        require_shell(files[name], tmp_path)
    asked = directives(files["job.sbatch"])[0]
    assert {"no-kill", "requeue", "signal"} <= set(asked), "they hold for the whole job"
    assert asked["signal"] == "B:TERM@180"
    text = files["job.sbatch"].replace("\\\n", " ")
    for line in (line for line in text.splitlines() if line.startswith("srun --het")):
        words = [word for word in line.split() if word.startswith("--")]
        assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=0"} <= set(words)
        for word in words:
            require_option(word, SRUN)
    assert "--nproc-per-node" not in files["start.sh"]


def test_pods_are_replaced_one_by_one() -> None:
    found = kubernetes_files(crossed_job(elastic=True))
    for text in found.values():
        for document in yaml.safe_load_all(text):
            require_kubernetes(document)
    (jobset,) = yaml.safe_load_all(found["jobset.yaml"])
    for job in replicated_jobs(jobset):
        spec = job["template"]["spec"]
        assert spec["backoffLimitPerIndex"] == 3
        assert "backoffLimit" not in spec
        actions = [rule["action"] for rule in spec["podFailurePolicy"]["rules"]]
        assert actions == ["Ignore", "FailJob"]
        script = spec["template"]["spec"]["containers"][0]["args"][0]
        assert "tutti agent --join" in script
        assert "--nproc-per-node" not in script


class Members:
    """A `tutti` that writes down how it was called, and ends as it is told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "job"
        (folder / "bin").mkdir()
        program = folder / "bin" / "tutti"
        program.write_text(
            "#!/usr/bin/env bash\n"
            f'echo "$TUTTI_NODE: $*" >> {folder}/calls\n'
            f"if [[ -f {folder}/slow ]]; then\n"
            f"  trap 'echo drained >> {folder}/calls; exit 0' TERM\n"
            f"  touch {folder}/waits; while true; do sleep 0.1; done\nfi\n"
            f'code=$(head -n1 {folder}/codes); sed -i 1d {folder}/codes; exit "${{code:-0}}"\n'
        )
        program.chmod(0o755)
        (folder / "bin" / "sleep").write_text("#!/bin/sh\nexec /bin/sleep 0.01\n")
        (folder / "bin" / "sleep").chmod(0o755)
        files = torchrun_files(crossed_job(elastic=True, **NAMED))
        for name in ("start.sh", "run.sh"):
            require_shell(files[name], folder)
        write_folder(self.run, files)

    def start(self, node: str, codes: str = "") -> subprocess.Popen[str]:
        (self.folder / "codes").write_text(codes)
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return subprocess.Popen(
            ["bash", str(self.run / "start.sh"), node], text=True,
            env={**os.environ, "PATH": path, "MASTER_ADDR": "o2"},
        )  # fmt: skip

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def members(tmp_path: Path) -> Members:
    return Members(tmp_path)


def test_the_first_host_leads_and_the_others_join(members: Members) -> None:
    for node in ("a100/1", "a100/0"):
        assert members.start(node).wait(30) == 0
    leads, joins = members.calls()
    assert leads.startswith("a100/1: train ")
    assert leads.endswith("--resume=if-any --set elastic.listen=o2:29500 --set elastic.node=a100/1")
    assert joins == "a100/0: agent --join o2:29500 --node a100/0 --wait 1800"


def test_a_member_that_fails_tries_again_but_not_with_wrong_input(members: Members) -> None:
    assert members.start("a100/0", "1\n137\n").wait(30) == 0
    assert len(members.calls()) == 3
    assert members.start("a100/0", "2\n").wait(30) == 2
    assert len(members.calls()) == 4
    assert members.start("a100/0", "1\n" * 9).wait(30) == 1
    assert len(members.calls()) == 8, "a first try and three more"


def test_who_is_asked_to_end_lets_its_member_end_first(members: Members) -> None:
    (members.folder / "slow").touch()
    started = members.start("a100/0")
    while not (members.folder / "waits").exists():
        time.sleep(0.05)
    started.send_signal(signal.SIGTERM)
    started.wait(30)
    assert members.calls()[-1] == "drained"
    assert len(members.calls()) == 2, "it is not started again"


def test_agents_need_a_training_file() -> None:
    job = Job.of(crossed_plan(), facts_of({"elastic": True}))
    with pytest.raises(InputError, match="needs a training file"):
        slurm_files(job)


@pytest.mark.parametrize("left", [False, True])
def test_a_leader_goes_on_if_there_is_anything_to_go_on_with(
    left: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    from tutti.cli import train
    from tutti.train.run import starting

    seen: dict[str, object] = {}
    monkeypatch.setattr(starting, "has_checkpoints", lambda _: left)
    monkeypatch.setattr(
        starting, "check_inputs", lambda _, resume, overwrite: seen.update(r=resume, o=overwrite)
    )

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "_prepared", stop)
    config = tmp_path / "train.yaml"
    config.write_text("model: llama-3.2-1b\nsteps: 1\ndata: {train: [synthetic]}\n")
    with pytest.raises(KeyboardInterrupt):
        train.train(config=config, resume="if-any", output=str(tmp_path / "out"))
    assert seen == {"r": left, "o": not left}


def test_a_name_is_listened_at_by_its_number() -> None:
    join = pytest.importorskip("tutti.elastic.join")
    assert join.own_address("10.1.2.3") == "10.1.2.3"
    assert join.own_address("localhost") in {"127.0.0.1", "::1"}
    with pytest.raises(InputError, match=r"elastic\.listen: 'no\.such\.host' is not known here"):
        join.own_address("no.such.host")
