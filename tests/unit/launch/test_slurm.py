from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.support.launching import (
    IMAGES,
    FakeHosts,
    crossed_job,
    facts_of,
    plan_of,
    three_makers_job,
)
from tests.unit.launch.schemas import SRUN, directives, require_option, require_shell
from tutti.document import Place
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.launch.identity import rank_of_process
from tutti.launch.job import Job
from tutti.launch.slurm import slurm_files, slurm_notes
from tutti.launch.targets import write_folder
from tutti.plan.chips import ChipSet
from tutti.plan.plan import Replica

FULL: dict[str, object] = {
    "name": "mixed",
    "slurm": {"account": "research", "qos": "long", "time": "2-00:00:00", "reservation": "r1",
              "options": ["--mail-type=END"]},
    "volumes": [{"name": "data", "mount": "/data", "host_path": "/mnt/data"}],
    "restarts": 0,
    "pools": {
        "h100": {**IMAGES["h100"], "gres": "gpu:h100", "cpus": 96, "memory": "1500G",
                 "constraint": "ib", "container": "pyxis"},
        "a100": {**IMAGES["a100"], "hosts": ["old[1-2]"], "container": "apptainer"},
        "p800": {**IMAGES["p800"]},
    },
}  # fmt: skip


def steps(script: str) -> list[list[str]]:
    """Return the words of every srun up to its program."""
    found = []
    for text in re.findall(r"^  srun (.*?) &$", script.replace("\\\n", " "), re.MULTILINE):
        words = shlex.split(text)
        found.append(words[: next(i for i, w in enumerate(words) if not w.startswith("--"))])
    return found


@pytest.mark.parametrize("facts", [{}, FULL], ids=["defaults", "everything"])
def test_directives_and_steps_are_documented_options(
    facts: dict[str, object], tmp_path: Path
) -> None:
    files = slurm_files(crossed_job(**facts))
    require_shell(files["job.sbatch"], tmp_path)
    require_shell(files["start.sh"], tmp_path)
    components = directives(files["job.sbatch"])
    assert len(components) == 4
    found = [dict(require_option(w, SRUN) for w in words) for words in steps(files["job.sbatch"])]
    assert [options["het-group"] for options in found] == ["0", "1", "2", "3"]
    for component, step in zip(components, found, strict=True):
        assert component["nodes"] == step["nodes"] == step["ntasks"]
        assert component.get("cpus-per-task") == step.get("cpus-per-task")


def test_three_makers_are_three_components(tmp_path: Path) -> None:
    files = slurm_files(three_makers_job())
    require_shell(files["job.sbatch"], tmp_path)
    require_shell(files["start.sh"], tmp_path)
    components = directives(files["job.sbatch"])
    assert [c["gres"] for c in components] == ["gpu:8", "npu:8", "xpu:8"]
    assert "set_env.sh" in files["start.sh"]  # Ascend's tools need it


def test_components_ask_for_their_pool() -> None:
    components = directives(slurm_files(crossed_job(**FULL))["job.sbatch"])
    assert [c["partition"] for c in components] == ["old", "new", "old", "xpu"]
    assert [c["gres"] for c in components] == ["gpu:8", "gpu:h100:4", "gpu:6", "xpu:8"]
    assert [c.get("nodelist") for c in components] == ["old2", None, "old1", None]
    assert ["exclusive" in c for c in components] == [True, False, False, True]
    # a host that is shared gives its chips' part of the cores; the others give all
    assert [c.get("cpus-per-task") for c in components] == [None, "96", "96", None]
    defaults = directives(slurm_files(crossed_job())["job.sbatch"])
    assert [c.get("cpus-per-task") for c in defaults] == [None, "56", "96", None]
    assert components[0]["account"] == "research"
    assert "account" not in components[1]  # Slurm hands it on


def gres_of(**pools: dict[str, object]) -> list[str]:
    return [c["gres"] for c in directives(slurm_files(crossed_job(pools=pools))["job.sbatch"])]


def test_chips_of_one_name_are_asked_for_by_type() -> None:
    assert gres_of() == ["gpu:a100-80:8", "gpu:h100:4", "gpu:a100-80:6", "xpu:8"]
    # one pool says itself which hosts it means; the other may still be given those
    assert gres_of(h100={"constraint": "h100"}) == [
        "gpu:a100-80:8", "gpu:4", "gpu:a100-80:6", "xpu:8",
    ]  # fmt: skip
    assert gres_of(h100={"gres": "gpu"}, a100={"partition": "old"})[:2] == ["gpu:8", "gpu:4"]
    same = {"partition": "all"}
    assert gres_of(h100=same, a100=same)[:2] == ["gpu:a100-80:8", "gpu:h100:4"]
    (note,) = slurm_notes(crossed_job(pools={}))
    assert "a100: gpu:a100-80, h100: gpu:h100" in note
    assert "--with" in note
    assert slurm_notes(crossed_job()) == []  # each has its partition


@pytest.mark.parametrize(
    "line", ["#SBATCH --nodez=1", "#SBATCH --nodes=many", "#SBATCH --exclusive=", "#SBATCH -N 1"]
)
def test_the_check_itself_finds_faults(line: str) -> None:
    with pytest.raises(AssertionError):
        directives(f"#!/usr/bin/env bash\n{line}\n")


SCONTROL = """
[[ $1 == show && $2 == hostnames ]]
tr , '\\n' <<<"$3"
"""
SRUN_PROGRAM = """
group=0
while [[ $1 == --* ]]; do
  if [[ $1 == --het-group=* ]]; then group=${1#*=}; fi
  shift
done
list=SLURM_JOB_NODELIST_HET_GROUP_$group
status=0
for host in $(tr , ' ' <<<"${!list-$SLURM_JOB_NODELIST}"); do
  SLURMD_NODENAME=$host "$@" || status=1
done
exit "$status"
"""


def a_small_slurm(folder: Path) -> FakeHosts:
    fake = FakeHosts(folder)
    fake.add("scontrol", SCONTROL)
    fake.add("srun", SRUN_PROGRAM)
    fake.add("apptainer", 'while [[ $1 != registry* ]]; do shift; done; exec "${@:2}"')
    return fake


def test_the_job_starts_every_rank_once(tmp_path: Path) -> None:
    job = crossed_job(**FULL)
    fake = a_small_slurm(tmp_path / "fake")
    folder = tmp_path / "with blank"
    write_folder(folder, slurm_files(job))
    groups = ["old2", "n7", "old1", "x3"]
    variables = {f"SLURM_JOB_NODELIST_HET_GROUP_{i}": name for i, name in enumerate(groups)}
    code, output = fake.run(
        ["bash", "job.sbatch"], folder, SLURM_SUBMIT_DIR=str(folder), **variables
    )
    assert code == 0, output
    started = fake.started()
    assert [s.node for s in started] == ["a100/1", "h100/0", "a100/0", "p800/0"]
    assert [s.node_rank for s in started] == [0, 1, 2, 3]
    assert {s.environment["MASTER_ADDR"] for s in started} == {"old2"}  # it holds rank 0
    ranks = [
        rank_of_process(job.plan, {**s.environment, "LOCAL_RANK": str(local)})
        for s in started
        for local in range(s.processes)
    ]
    assert sorted(ranks) == list(range(job.plan.num_ranks))
    assert started[0].words[-3:] == [
        f"{folder}/train.yaml", "--plan", f"{folder}/plan.json",
    ]  # fmt: skip


def four_nodes_job(**facts: object) -> Job:
    pools = [{"name": "h100", "chip": "H100", "nodes": 4}]
    fabric = {"tiers": [{"name": "leaf", "nodes": 2}, {"name": "spine"}]}
    cluster = Cluster.from_document(
        {"name": "four", "pools": pools, "fabric": fabric}, Place("four")
    )
    plan = plan_of(cluster, [[Replica(chips=ChipSet.of("h100/0-3/0-7"), tp=8, count=4)]])
    return Job.of(plan, facts_of({"pools": {"h100": IMAGES["h100"]}, **facts}))


@pytest.mark.parametrize("known", [True, False], ids=["topology", "none"])
def test_hosts_are_paired_by_where_they_hang(tmp_path: Path, known: bool) -> None:
    """Slurm gives hosts of two leaves in turn; nodes 0 and 1 of the plan share a leaf."""
    fake = a_small_slurm(tmp_path / "fake")
    address = "core.leaf$((${host#n} % 2)).$host" if known else ""
    said = f"  SLURM_TOPOLOGY_ADDR={address} SLURMD_NODENAME"
    fake.add("srun", SRUN_PROGRAM.replace("  SLURMD_NODENAME", said))
    folder = tmp_path / "files"
    write_folder(folder, slurm_files(four_nodes_job()))
    code, output = fake.run(
        ["bash", "job.sbatch"], folder, SLURM_SUBMIT_DIR=str(folder),
        SLURM_JOB_NODELIST="n3,n0,n1,n2",
    )  # fmt: skip
    assert code == 0, output
    first = fake.started()[0].environment
    order = ["n0", "n2", "n1", "n3"] if known else ["n3", "n0", "n1", "n2"]
    places = " ".join(f"{host}=h100/{node}" for node, host in enumerate(order))
    assert (first["TUTTI_PLACES"], first["MASTER_ADDR"]) == (places, order[0])


def test_hosts_are_asked_for_under_few_switches() -> None:
    script = slurm_files(four_nodes_job(slurm={"switches": "1@2:00:00"}))["job.sbatch"]
    assert directives(script)[0]["switches"] == "1@2:00:00"
    with pytest.raises(InputError, match="'switches' is 'all'; write how many"):
        four_nodes_job(slurm={"switches": "all"})


def test_a_failed_host_ends_the_job_after_its_restarts(tmp_path: Path) -> None:
    fake = a_small_slurm(tmp_path / "fake")
    folder = tmp_path / "files"
    write_folder(folder, slurm_files(crossed_job(restarts=2)))
    variables = {f"SLURM_JOB_NODELIST_HET_GROUP_{i}": f"n{i}" for i in range(4)}
    code, output = fake.run(
        ["bash", "job.sbatch"],
        folder,
        SLURM_SUBMIT_DIR=str(folder),
        FAKE_STATUS="3",
        FAKE_TOGETHER="4",
        **variables,
    )
    assert code == 1
    assert "restart 1 of 2" in output
    assert "restart 2 of 2" in output
    assert "restart 3" not in output
    assert {s.environment["TUTTI_ATTEMPT"] for s in fake.started()} == {"2"}


def test_submitted_from_elsewhere_it_says_so(tmp_path: Path) -> None:
    fake = a_small_slurm(tmp_path / "fake")
    folder = tmp_path / "files"
    write_folder(folder, slurm_files(crossed_job()))
    code, output = fake.run(
        ["bash", "job.sbatch"], folder, SLURM_SUBMIT_DIR=str(tmp_path), SLURM_JOB_NODELIST="n0"
    )
    assert code == 2
    assert "submit the job from the folder" in output


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"slurm": {"options": ["-N 3"]}}, "write each as sbatch takes it"),
        ({"slurm": {"account": "a b"}}, "'--account=a b' cannot stand in a batch script"),
        ({"pools": {"h100": {"partition": "x\n#SBATCH --nice=1"}}}, "cannot stand in a batch"),
    ],
)
def test_what_sbatch_would_misread_is_refused(facts: dict[str, object], said: str) -> None:
    with pytest.raises(InputError) as error:
        slurm_files(crossed_job(**facts))
    assert said in str(error.value)
