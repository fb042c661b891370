"""Launch files of a plan that serves: a front that answers clients, agents that run engines."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.launching import IMAGES, crossed_plan, facts_of
from tests.support.train_job import tutti
from tests.unit.launch.schemas import (
    SRUN,
    directives,
    require_kubernetes,
    require_option,
    require_shell,
)
from tutti.errors import InputError
from tutti.launch.job import Job
from tutti.launch.kubernetes import kubernetes_files, kubernetes_notes
from tutti.launch.slurm import slurm_files
from tutti.launch.targets import write_folder
from tutti.launch.torchrun import torchrun_files
from tutti.plan.files import save_plan
from tutti.plan.plan import Plan
from tutti.plan.serving import Lengths, Service, Traffic

HOSTS = {"h100": ["n1"], "a100": ["o1", "o2"], "p800": ["k1"]}
MODEL = "/models/it's mine"


def serving_plan() -> Plan:
    lengths = Lengths(mean=64, longest=256)
    plan = crossed_plan()
    service = Service(traffic=Traffic(prompt=lengths, output=lengths))
    return replace(plan, job=replace(plan.job, serving=service))


def serving_job(**facts: Any) -> Job:
    pools = {name: {**IMAGES[name], **facts.get("pools", {}).get(name, {})} for name in HOSTS}
    return Job.of(serving_plan(), facts_of({**facts, "pools": pools}), model_folder=MODEL)


def named() -> dict[str, Any]:
    return {"pools": {pool: {"hosts": names} for pool, names in HOSTS.items()}}


FULL: dict[str, Any] = {
    "volumes": [{"name": "models", "mount": "/models", "claim": "models", "read_only": True}],
    "kubernetes": {
        "namespace": "serving", "service_account": "server", "pull_secrets": ["registry"],
        "priority_class": "high", "host_network": True, "shared_memory": "64Gi",
    },
    "serving": {
        "port": 8080, "apis": 4, "ports": 30000, "health_port": 9000, "service": "LoadBalancer",
        "api_key_secret": "keys", "image": "front:1",
    },
    "pools": {
        "h100": {"node_selector": {"accelerator": "h100"}, "resources": {"rdma/hca": 1}},
        "p800": {"setup": ["source /opt/env.sh"], "environment": {"NOTE": "it's $HOME"}},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "facts", [pytest.param({}, marks=pytest.mark.slow), FULL], ids=["defaults", "everything"]
)
def test_objects_pass_the_schemas_and_find_each_other(
    facts: dict[str, Any], tmp_path: Path
) -> None:
    files = kubernetes_files(serving_job(**facts))
    assert set(files) == {"inputs.yaml", "secret.yaml", "serve.yaml"}
    found = [d for text in files.values() for d in yaml.safe_load_all(text)]
    for document in found:
        require_kubernetes(document)
    api, hosts = (d for d in found if d["kind"] == "Service")
    (front,) = (d for d in found if d["kind"] == "Deployment")
    sets = [d for d in found if d["kind"] == "StatefulSet"]
    pods = {d["metadata"]["name"]: d["spec"]["template"] for d in (front, *sets)}
    for service in (api, hosts):
        wanted = service["spec"]["selector"].items()
        chosen = [n for n, pod in pods.items() if wanted <= pod["metadata"]["labels"].items()]
        assert chosen == [front["metadata"]["name"]]
    assert hosts["spec"]["publishNotReadyAddresses"]
    (container,) = front["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert api["spec"]["ports"][0]["targetPort"] == "http"
    assert hosts["spec"]["ports"][0]["port"] == ports["hosts"]
    for document in (front, *sets):
        (own,) = document["spec"]["template"]["spec"]["containers"]
        assert own["livenessProbe"]["httpGet"]["path"] == "/health"
        assert own["readinessProbe"]["httpGet"]["path"] == "/ready"
        assert own["livenessProbe"]["httpGet"]["port"] in {port["name"] for port in own["ports"]}
        require_shell(own["args"][0], tmp_path)
        selector = document["spec"]["selector"]["matchLabels"]
        assert selector.items() <= document["spec"]["template"]["metadata"]["labels"].items()
    join = f'--join "{hosts["metadata"]["name"]}:{ports["hosts"]}"'
    assert all(join in own["spec"]["template"]["spec"]["containers"][0]["args"][0] for own in sets)


def test_a_pod_is_the_node_of_its_number(tmp_path: Path) -> None:
    """The scripts of all pods, run with a `tutti` that says what it was asked."""
    stand_in = tmp_path / "tutti"
    stand_in.write_text('#!/bin/bash\necho "$TUTTI_NODE" "$@"\n')
    stand_in.chmod(0o755)
    seen, front = [], ""
    for document in yaml.safe_load_all(kubernetes_files(serving_job())["serve.yaml"]):
        if document["kind"] not in ("StatefulSet", "Deployment"):
            continue
        (container,) = document["spec"]["template"]["spec"]["containers"]
        for index in range(document["spec"]["replicas"]):
            environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "POD_INDEX": str(index)}
            said = subprocess.run(
                [*container["command"], container["args"][0]],
                env=environment, capture_output=True, text=True, check=True,
            ).stdout  # fmt: skip
            assert f"serve {MODEL} --plan /etc/tutti/plan.json" in said
            if document["kind"] == "StatefulSet":
                seen.append(said.split()[0])
            else:
                front = said
    assert sorted(seen) == ["a100/0", "a100/1", "h100/0", "p800/0"]
    assert "--listen 0.0.0.0:29500 --host 0.0.0.0 --port 8000 --apis 1" in front


@pytest.mark.parametrize(
    "facts", [{}, pytest.param(named(), marks=pytest.mark.slow)], ids=["any hosts", "named"]
)
def test_slurm(facts: dict[str, Any], tmp_path: Path) -> None:
    files = slurm_files(serving_job(**facts))
    for name in ("job.sbatch", "start.sh"):
        require_shell(files[name], tmp_path)
    assert {"no-kill", "requeue", "signal"} <= set(directives(files["job.sbatch"])[0])
    text = files["job.sbatch"].replace("\\\n", " ")
    for line in (line for line in text.splitlines() if line.startswith("srun --het")):
        for word in (word for word in line.split() if word.startswith("--")):
            require_option(word, SRUN)


class Started:
    """`start.sh` of a host, with a `tutti` that writes what it is asked and fails as told."""

    def __init__(self, folder: Path, node: str, script: str) -> None:
        write_folder(folder / "files", torchrun_files(serving_job(**named(), restarts=1)))
        (folder / "tutti").write_text(f'#!/bin/bash\necho "$@" >> {folder}/log\n{script}\n')
        (folder / "tutti").chmod(0o755)
        self._log = folder / "log"
        self.process = subprocess.Popen(
            ["bash", str(folder / "files" / "start.sh"), node],
            env={"PATH": f"{folder}:{os.environ['PATH']}"},
            start_new_session=True,
        )

    def asked(self, count: int) -> list[str]:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            lines = self._log.read_text().splitlines() if self._log.exists() else []
            if len(lines) >= count:
                return lines
            time.sleep(0.02)
        raise AssertionError(f"{count} commands were expected")


def test_the_first_host_answers_clients_too(tmp_path: Path) -> None:
    started = Started(tmp_path, "a100/1", "trap 'exit 0' TERM; sleep 60 & wait $!")
    front, agent = sorted(started.asked(2), key=lambda line: "--join" in line)
    assert "--listen o2:29500 --host o2 --port 8000 --apis 1" in front
    assert "--join o2:29500 --ports 29600" in agent
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(20) == 0


def test_what_cannot_be_is_not_tried_again(tmp_path: Path) -> None:
    started = Started(tmp_path, "p800/0", "exit 2")
    assert started.process.wait(20) == 2
    assert len(started.asked(1)) == 1


def test_scripts_of_ssh(tmp_path: Path) -> None:
    files = torchrun_files(serving_job(**named()))
    for name in ("start.sh", "run.sh"):
        require_shell(files[name], tmp_path)


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="'elastic: true' in the launch file is for training"):
        slurm_files(serving_job(elastic=True))
    path, training = tmp_path / "serve.json", tmp_path / "train.json"
    save_plan(serving_plan(), path)
    save_plan(crossed_plan(), training)
    cases = {
        (str(path), "--to", "slurm"): "serves; say which model: --serve FOLDER",
        (str(training), "--serve", "/m"): "is for training; leave --serve out",
    }
    for words, why in cases.items():
        code, _, error = tutti(capsys, "launch", *words)
        assert code == 2
        assert why in error
    assert MODEL in kubernetes_notes(serving_job())[0]
