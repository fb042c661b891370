from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.support.launching import IMAGES, FakeHosts, crossed_job, crossed_plan, three_makers_job
from tests.unit.launch.schemas import replicated_jobs, require_kubernetes, require_shell
from tutti.errors import InputError
from tutti.launch.identity import rank_of_process
from tutti.launch.kubernetes import kubernetes_files, kubernetes_notes
from tutti.plan.files import plan_from_document

FULL: dict[str, object] = {
    "name": "mixed",
    "folder": "/shared/run",
    "environment": {"NCCL_DEBUG": "WARN"},
    "volumes": [
        {"name": "shared", "mount": "/shared", "claim": "training"},
        {"name": "data", "mount": "/data", "host_path": "/mnt/data", "read_only": True},
    ],
    "kubernetes": {
        "namespace": "training",
        "queue": "mixed",
        "service_account": "trainer",
        "pull_secrets": ["registry"],
        "priority_class": "high",
        "topology": "topology.tutti/leaf",
        "topology_mode": "required",
        "host_network": True,
        "shared_memory": "64Gi",
        "keep_seconds": 3600,
    },
    "pools": {
        "h100": {
            **IMAGES["h100"],
            "interface": "eth0",
            "node_selector": {"accelerator": "h100", "spot": "false"},
            "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "resources": {"rdma/hca": 1},
            "capabilities": ["IPC_LOCK"],
            "cpus": 96,
            "memory": "1500Gi",
        },
        "a100": {**IMAGES["a100"], "launcher": ["python3", "-m", "torch.distributed.run"]},
        "p800": {
            **IMAGES["p800"],
            "setup": ["source /opt/env.sh"],
            "environment": {"NOTE": 'it\'s "quoted" $HOME'},
        },
    },
}


def documents(kind: str = "jobset", **facts: object) -> dict[str, dict[str, Any]]:
    found = kubernetes_files(crossed_job(**facts))
    assert set(found) == {"inputs.yaml", "secret.yaml", f"{kind}.yaml"}
    listed = [d for text in found.values() for d in yaml.safe_load_all(text)]
    return {document["kind"]: document for document in listed}


def with_kind(kind: str) -> dict[str, object]:
    settings = FULL["kubernetes"]
    assert isinstance(settings, dict)
    return {**FULL, "kubernetes": {**settings, "kind": kind}}


@pytest.mark.parametrize("facts", [{}, FULL], ids=["defaults", "everything"])
def test_a_jobset_passes_its_schema(facts: dict[str, object]) -> None:
    found = documents(**facts)
    for document in found.values():
        require_kubernetes(document)


def test_three_makers_pass_the_schema(tmp_path: Path) -> None:
    found = kubernetes_files(three_makers_job())
    require_kubernetes(yaml.safe_load(found["inputs.yaml"]))
    require_kubernetes(yaml.safe_load(found["secret.yaml"]))
    jobset = yaml.safe_load(found["jobset.yaml"])
    require_kubernetes(jobset)
    pods = [job["template"]["spec"]["template"]["spec"] for job in replicated_jobs(jobset)]
    assert [pod["containers"][0]["resources"]["limits"] for pod in pods] == [
        {"nvidia.com/gpu": "8"}, {"huawei.com/Ascend910": "8"}, {"kunlunxin.com/xpu": "8"},
    ]  # fmt: skip
    for pod in pods:
        require_shell(pod["containers"][0]["args"][0], tmp_path)


def test_a_train_job_passes_its_schema() -> None:
    found = documents("trainjob", **with_kind("trainjob"))
    assert set(found) == {"ConfigMap", "Secret", "TrainingRuntime", "TrainJob"}
    for document in found.values():
        require_kubernetes(document)
    assert found["TrainJob"]["spec"]["runtimeRef"]["name"] == "mixed"
    jobs = replicated_jobs(found["TrainingRuntime"])
    assert [job["name"] for job in jobs] == ["a100", "h100", "a100-2", "p800"]
    steps = [job["template"].get("metadata", {}).get("labels", {}) for job in jobs]
    assert [bool(labels) for labels in steps] == [True, False, False, False]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d["spec"].update(replicas=1),
        lambda d: d["spec"]["failurePolicy"].update(maxRestarts="three"),
        lambda d: d["spec"]["replicatedJobs"][0]["template"]["spec"].update(paralelism=1),
        lambda d: d["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
            "containers"
        ][0].update(img="x"),
        lambda d: d["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"].update(
            restartPolicy=1
        ),
    ],
)
def test_the_check_itself_finds_faults(spoil: Any) -> None:
    document = copy.deepcopy(documents()["JobSet"])
    spoil(document)
    with pytest.raises((AssertionError, ValueError, kubernetes_validate.ValidationError)):
        require_kubernetes(document)


def test_pods_ask_kueue_for_one_group() -> None:
    text = kubernetes_files(crossed_job(**FULL))["jobset.yaml"]
    wanted = "kueue.x-k8s.io/podset-required-topology: topology.tutti/leaf"
    assert text.count(wanted) == 4
    assert "podset-" not in kubernetes_files(crossed_job())["jobset.yaml"]


def test_one_replicated_job_per_pool_with_its_image_and_devices() -> None:
    jobs = replicated_jobs(documents()["JobSet"])
    containers = {
        job["name"]: job["template"]["spec"]["template"]["spec"]["containers"][0] for job in jobs
    }
    assert {name: c["image"].rpartition(":")[2] for name, c in containers.items()} == {
        "a100": "cuda", "h100": "cuda", "a100-2": "cuda", "p800": "kunlun",
    }  # fmt: skip
    assert {name: c["resources"]["limits"] for name, c in containers.items()} == {
        "a100": {"nvidia.com/gpu": "8"},
        "h100": {"nvidia.com/gpu": "4"},  # as many as the plan uses
        "a100-2": {"nvidia.com/gpu": "6"},
        "p800": {"kunlunxin.com/xpu": "8"},
    }
    for job in jobs:
        pod = job["template"]["spec"]["template"]["spec"]
        shares = job["name"] in ("h100", "a100-2")
        assert ("affinity" in pod) == shares  # a second pod would fit on the same machine


def test_pods_start_the_ranks_of_their_chips(tmp_path: Path) -> None:
    """Every container's script, run: all ranks, each once, and one rendezvous."""
    found = documents(**FULL)
    plan = plan_from_document(yaml.safe_load(found["ConfigMap"]["data"]["plan.json"]), "plan.json")
    assert plan == crossed_plan()
    assert found["ConfigMap"]["data"]["train.yaml"] == "steps: 10\n"
    fake = FakeHosts(tmp_path)
    fake.add("python3", 'exec torchrun "${@:3}"')
    masters = set()
    for job in replicated_jobs(found["JobSet"]):
        container = job["template"]["spec"]["template"]["spec"]["containers"][0]
        (script,) = container["args"]
        script = script.replace("source /opt/env.sh", "SET_UP=1; export SET_UP")
        require_shell(script, tmp_path)
        masters |= {item["value"] for item in container["env"] if item["name"] == "MASTER_ADDR"}
        for index in range(job["template"]["spec"]["completions"]):
            environment = {i["name"]: i["value"] for i in container["env"] if "value" in i}
            code, output = fake.run(
                [*container["command"], script],
                tmp_path,
                JOB_COMPLETION_INDEX=str(index),
                **environment,
            )
            assert code == 0, output
    assert masters == {"mixed-a100-0-0.mixed"}  # a100/1 holds rank 0
    started = fake.started()
    assert [s.node for s in started] == ["a100/1", "h100/0", "a100/0", "p800/0"]
    assert [s.node_rank for s in started] == [0, 1, 2, 3]
    ranks = [
        rank_of_process(plan, {**s.environment, "LOCAL_RANK": str(local)})
        for s in started
        for local in range(s.processes)
    ]
    assert sorted(ranks) == list(range(plan.num_ranks))
    assert started[0].words[-5:] == [
        "tutti", "train", "/etc/tutti/train.yaml", "--plan", "/etc/tutti/plan.json",
    ]  # fmt: skip
    by_node = {s.node: s.environment for s in started}
    assert by_node["p800/0"]["NOTE"] == 'it\'s "quoted" $HOME'
    assert by_node["p800/0"]["SET_UP"] == "1"
    assert by_node["h100/0"]["NCCL_SOCKET_IFNAME"] == "eth0"
    assert "CUDA_VISIBLE_DEVICES" not in by_node["h100/0"]  # the device plug-in chooses


def test_whole_nodes_choose_the_plan_s_slots() -> None:
    pools = {**IMAGES, "h100": {**IMAGES["h100"], "whole_nodes": True}}
    jobs = {job["name"]: job for job in replicated_jobs(documents(pools=pools)["JobSet"])}
    pod = jobs["h100"]["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert "export CUDA_VISIBLE_DEVICES=0,1,4,5" in pod["containers"][0]["args"][0]
    assert "affinity" not in pod


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (
            {"pools": {}},
            "pool 'a100' has no 'image'; name one with tutti and torch for A100-80 in a launch "
            "file, --with launch.yaml (pools: {a100: {image: …}})",
        ),
        ({"name": "a" * 60}, "letters of at most 63; give a shorter 'name'"),
        ({"folder": "/elsewhere"}, "'folder' is '/elsewhere', which is on no volume"),
        (
            {
                "pools": {
                    pool: {
                        **facts,
                        "volumes": [{"name": "own", "mount": f"/{pool}", "host_path": "/x"}],
                    }
                    for pool, facts in IMAGES.items()
                }
            },
            "the pools share no volume, but checkpoints need one",
        ),
    ],
)
def test_what_cannot_run_is_refused(facts: dict[str, object], said: str) -> None:
    with pytest.raises(InputError) as error:
        kubernetes_files(crossed_job(**facts))
    assert said in str(error.value)


def test_what_is_assumed_is_said() -> None:
    claim, alike = kubernetes_notes(crossed_job())
    assert "the PersistentVolumeClaim 'tutti-shared', mounted at /shared" in claim
    assert "'volumes' in a launch file (--with)" in claim
    assert "(a100, h100: nvidia.com/gpu)" in alike
    assert "'node_selector'" in alike
    selected = {pool: {**facts, "node_selector": {"chip": pool}} for pool, facts in IMAGES.items()}
    assert kubernetes_notes(crossed_job(**{**FULL, "pools": selected})) == []


def test_a_configuration_that_no_block_can_hold_arrives_whole() -> None:
    odd = "  steps: 10 \n\ttab: é\n#no newline at the end"
    job = replace(crossed_job(), config=odd)
    inputs = yaml.safe_load(kubernetes_files(job)["inputs.yaml"])
    assert inputs["data"]["train.yaml"] == odd
