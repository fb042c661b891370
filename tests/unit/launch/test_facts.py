from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launching import crossed_job, crossed_plan, facts_of, plan_of
from tutti.document import Place
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.hardware.library import shipped
from tutti.launch.facts import Facts, makers, resolve
from tutti.launch.job import Job
from tutti.launch.kubernetes import kubernetes_files
from tutti.launch.slurm import slurm_files
from tutti.plan.check import embedded_cluster
from tutti.plan.chips import ChipSet
from tutti.plan.plan import Replica


def test_every_maker_of_the_catalog_is_known() -> None:
    vendors = {chip.vendor.casefold() for chip in shipped().chips.values()}
    emulated = {pool.chip.vendor for pool in Cluster.load("laptop").pools}
    assert vendors | emulated == set(makers())
    assert all(maker.source for maker in makers().values())


def test_defaults_follow_the_maker_and_can_be_overridden() -> None:
    cluster = embedded_cluster(crossed_plan())
    facts = facts_of(
        {
            "environment": {"A": 1, "HCCL_CONNECT_TIMEOUT": 7},
            "pools": {
                "p800": {"device": "example.com/p800", "visible": "", "environment": {"A": 2}},
                "unused": {"interface": "eth1", "setup": []},
            },
        }
    )
    h100, _, p800, ascend = (resolve(facts, pool) for pool in cluster.pools)
    assert (h100.device, h100.gres, h100.visible) == (
        "nvidia.com/gpu", "gpu", "CUDA_VISIBLE_DEVICES",
    )  # fmt: skip
    assert (p800.device, p800.gres, p800.visible) == ("example.com/p800", "xpu", "")
    assert (h100.environment["A"], p800.environment["A"]) == ("1", "2")
    assert ascend.device == "huawei.com/Ascend910"
    assert ascend.environment["HCCL_SOCKET_IFNAME"] == "eth1"
    assert ascend.environment["GLOO_SOCKET_IFNAME"] == "eth1"
    assert ascend.environment["HCCL_CONNECT_TIMEOUT"] == "7"
    assert ascend.setup == ()
    assert resolve(Facts(), cluster.pool("unused")).setup


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"pool": {}}, "launch.yaml: unknown key 'pool'; did you mean 'pools'?"),
        ({"pools": {"h100": {"imag": "x"}}}, "pools: h100: unknown key 'imag'; did you mean"),
        ({"environment": {"a-b": 1}}, "environment: 'a-b' cannot be the name of a variable"),
        ({"environment": {"RANK": 1}}, "'RANK' is set by the launch files themselves"),
        ({"volumes": [{"name": "a", "mount": "/a"}]}, "give either 'claim' or 'host_path'"),
        ({"volumes": [{"name": "a", "mount": "a", "claim": "b"}]}, "'mount' is 'a'; it must begin"),
        ({"volumes": [{"name": "A b", "mount": "/a", "claim": "b"}]}, "a name is of small letters"),
        ({"folder": "runs"}, "'folder' is 'runs'; it must begin with /"),
        ({"port": 80}, "'port' is 80; must be at least 1024"),
        ({"command": []}, "'command' is empty"),
        ({"pools": {"h100": {"launcher": []}}}, "'launcher' is empty"),
        ({"pools": {"h100": {"container": "pyxis"}}}, "but there is no 'image'"),
        ({"pools": {"h10": {}}}, "cluster 'mixed' has no pool 'h10'; did you mean 'h100'?"),
        ({"pools": {"a100": {"hosts": ["a"]}}}, "'hosts' names 1, but the cluster file has 2"),
        ({"pools": {"a100": {"hosts": ["a", "a"]}}}, "'hosts' names 'a' twice"),
        ({"pools": {"a100": {"hosts": ["a b", "c"]}}}, "'a b' cannot be the name of a host"),
    ],
)
def test_errors_name_the_place_and_the_remedy(document: object, said: str) -> None:
    with pytest.raises(InputError) as error:
        Job.of(crossed_plan(), facts_of(document), facts_name="launch.yaml")
    assert said in str(error.value)


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    (tmp_path / "launch.yaml").write_text("# nothing yet\n")
    assert Facts.load(tmp_path / "launch.yaml") == Facts()


def test_an_unknown_maker_has_to_be_described() -> None:
    chip = {"base": "H100", "name": "N1", "vendor": "Newcomer"}
    cluster = Cluster.from_document(
        {"name": "new", "chips": [chip], "pools": [{"name": "new", "chip": "N1"}]}, Place("new")
    )
    plan = plan_of(cluster, [[Replica(chips=ChipSet.of("new/0/0-7"), tp=2, count=4)]])
    bare = {"image": "new:1"}
    job = Job.of(plan, facts_of({"pools": {"new": bare}}))
    with pytest.raises(InputError, match=r"nothing is known of chips by 'Newcomer'.*'device:"):
        kubernetes_files(job)
    with pytest.raises(InputError, match=r"nothing is known of chips by 'Newcomer'.*'gres: gpu'"):
        slurm_files(job)
    told = facts_of({"pools": {"new": {**bare, "device": "new.example/n1", "gres": "n1"}}})
    assert '"8"' in kubernetes_files(Job.of(plan, told))["jobset.yaml"]
    script = slurm_files(Job.of(plan, told))["job.sbatch"]
    assert "#SBATCH --gres=n1:8" in script
    assert "hetjob" not in script  # one component is a plain job
    assert "--het-group" not in script


def test_a_pool_that_the_plan_does_not_use_gets_no_job() -> None:
    job = crossed_job()
    assert "unused" not in {part.launch.pool.name for part in job.parts}
