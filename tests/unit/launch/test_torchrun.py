from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.launching import IMAGES, FakeHosts, crossed_job, facts_of, plan_of
from tests.unit.launch.schemas import require_shell
from tutti.document import Place
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.launch.identity import rank_of_process
from tutti.launch.job import Job
from tutti.launch.targets import next_command, write_folder
from tutti.launch.torchrun import torchrun_files
from tutti.plan.chips import ChipSet
from tutti.plan.plan import Replica

HOSTS: dict[str, object] = {
    "pools": {
        "h100": {"hosts": ["new0"]},
        "a100": {"hosts": ["old[1-2]"], "image": "tutti.sif", "container": "apptainer"},
        "p800": {"hosts": ["10.0.0.9"]},
    },
    "folder": "",
    "restarts": 0,
}
SSH = """
[[ $1 == -tt ]]
echo "on $2"
SSH_HOST=$2 bash -c "$3"
"""


def test_scripts_are_clean_and_can_be_executed(tmp_path: Path) -> None:
    for facts in ({}, HOSTS):
        files = torchrun_files(crossed_job(**facts))
        assert ("run.sh" in files) == bool(facts)
        for name in files:
            if name.endswith(".sh"):
                require_shell(files[name], tmp_path)
    folder = tmp_path / "files"
    write_folder(folder, files)
    assert (folder / "run.sh").stat().st_mode & stat.S_IXUSR
    assert not (folder / "plan.json").stat().st_mode & stat.S_IXUSR


def test_run_starts_every_host_by_ssh(tmp_path: Path) -> None:
    job = crossed_job(**HOSTS)
    fake = FakeHosts(tmp_path / "fake")
    fake.add("ssh", SSH)
    fake.add("apptainer", 'while [[ $1 != *.sif ]]; do shift; done; IN_IMAGE=1 exec "${@:2}"')
    folder = tmp_path / "with blank"
    write_folder(folder, torchrun_files(job))
    code, output = fake.run(["bash", str(folder / "run.sh")], tmp_path)
    assert code == 0, output
    assert "[a100/1] on old2" in output
    started = fake.started()
    assert [(s.node, s.environment["SSH_HOST"]) for s in started] == [
        ("a100/1", "old2"), ("h100/0", "new0"), ("a100/0", "old1"), ("p800/0", "10.0.0.9"),
    ]  # fmt: skip
    assert ["IN_IMAGE" in s.environment for s in started] == [True, False, True, False]
    assert all("--master-addr=old2" in s.words for s in started)
    ranks = [
        rank_of_process(job.plan, {**s.environment, "LOCAL_RANK": str(local)})
        for s in started
        for local in range(s.processes)
    ]
    assert sorted(ranks) == list(range(job.plan.num_ranks))
    # Without a scheduler the slots are chosen here: LOCAL_RANK 2 of h100/0 is slot 4.
    chosen = {s.node: s.environment.get("CUDA_VISIBLE_DEVICES") for s in started}
    assert chosen["h100/0"] == "0,1,4,5"
    assert chosen["a100/0"] == "0,1,2,3,4,5"
    assert chosen["a100/1"] is None


def test_localhost_needs_no_ssh(tmp_path: Path) -> None:
    """Pools that share a machine, each with variables of its own."""
    pools: dict[str, dict[str, object]] = {
        pool: {"hosts": ["localhost"], "environment": {"SHARE": pool}} for pool in IMAGES
    }
    pools["a100"]["hosts"] = ["localhost", "other"]
    fake = FakeHosts(tmp_path / "fake")
    fake.add("ssh", SSH)
    folder = tmp_path / "files"
    write_folder(folder, torchrun_files(crossed_job(pools=pools, restarts=0)))
    code, output = fake.run(["bash", str(folder / "run.sh")], tmp_path)
    assert code == 0, output
    found = {s.node: (s.environment["SHARE"], "SSH_HOST" in s.environment) for s in fake.started()}
    assert found == {
        "a100/0": ("a100", False), "a100/1": ("a100", True),
        "h100/0": ("h100", False), "p800/0": ("p800", False),
    }  # fmt: skip


def test_a_failed_host_ends_the_others(tmp_path: Path) -> None:
    job = crossed_job(**HOSTS)
    fake = FakeHosts(tmp_path / "fake")
    fake.add("ssh", "if [[ $2 == new0 ]]; then exit 7; fi; sleep 100")
    folder = tmp_path / "files"
    write_folder(folder, torchrun_files(job))
    code, output = fake.run(["bash", str(folder / "run.sh")], tmp_path)  # long before 100 s
    assert code == 1
    assert "a host failed; ending the others" in output


def test_start_says_what_is_missing(tmp_path: Path) -> None:
    fake = FakeHosts(tmp_path / "fake")
    folder = tmp_path / "files"
    write_folder(folder, torchrun_files(crossed_job()))
    code, output = fake.run(["bash", "start.sh", "a100/1"], folder, MASTER_ADDR="")
    assert code == 2
    assert "MASTER_ADDR is not set; it is the address of a100/1" in output
    code, output = fake.run(["bash", "start.sh", "a100/7"], folder, MASTER_ADDR="x")
    assert code == 2
    assert "'a100/7' is no node of this plan; it has: a100/1 h100/0 a100/0 p800/0" in output
    text = (folder / "commands.txt").read_text()
    assert "export MASTER_ADDR=… (the address of a100/1)" in text
    assert "# h100/0: ranks 8-9,24-25\nbash start.sh h100/0" in text


def test_a_rack_of_many_hosts(tmp_path: Path) -> None:
    """A node of several hosts: each starts its own chips, counted from 0 as the host does."""
    pools = [{"name": "rack", "node": "NVL72-GB200"}]
    cluster = Cluster.from_document({"name": "rack", "pools": pools}, Place("rack"))
    plan = plan_of(cluster, [[Replica(chips=ChipSet.of("rack/0/2-9"), tp=2, count=4)]])
    hosts = {"pools": {"rack": {"hosts": ["tray[00-17]"]}}, "restarts": 0}
    fake = FakeHosts(tmp_path / "fake")
    fake.add("ssh", SSH)
    folder = tmp_path / "files"
    write_folder(folder, torchrun_files(Job.of(plan, facts_of(hosts))))
    code, output = fake.run(["bash", str(folder / "run.sh")], tmp_path)
    assert code == 0, output
    found = {
        s.environment["SSH_HOST"]: (s.node, s.environment.get("CUDA_VISIBLE_DEVICES"))
        for s in fake.started()
    }
    assert found == {
        "tray00": ("rack/0/2-3", "2,3"),
        "tray01": ("rack/0/4-7", None),
        "tray02": ("rack/0/8-9", "0,1"),
    }


def test_the_next_command(tmp_path: Path) -> None:
    folder = Path("my files")
    assert next_command("torchrun", crossed_job(**HOSTS), folder) == "bash 'my files'/run.sh"
    assert "commands.txt" in next_command("torchrun", crossed_job(), folder)
    assert next_command("slurm", crossed_job(), folder) == "cd 'my files' && sbatch job.sbatch"
    assert next_command("kubernetes", crossed_job(), folder) == (
        "kubectl apply -f 'my files'/inputs.yaml -f 'my files'/secret.yaml "
        "-f 'my files'/jobset.yaml"
    )


def test_a_model_s_name_stays_in_its_comment(tmp_path: Path) -> None:
    job = crossed_job()
    odd = replace(job.plan, model=replace(job.plan.model, name="a\ntouch spoiled"))
    text = torchrun_files(replace(job, plan=odd))["start.sh"]
    assert text.splitlines()[1].startswith("# a touch spoiled, 26 ranks on ")


def test_pyxis_needs_slurm() -> None:
    pools = {"h100": {**IMAGES["h100"], "container": "pyxis"}}
    with pytest.raises(InputError, match="'container' is 'pyxis', which needs another launcher"):
        torchrun_files(crossed_job(pools=pools))
