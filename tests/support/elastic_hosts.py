"""Hosts on loopback: a cluster of one-chip nodes, and agents as a user would start them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.launching import plan_of
from tests.support.train_job import CONFIG, MODEL, TUTTI
from tutti import files
from tutti.document import plain
from tutti.elastic.journal import read_journal
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.plan.chips import ChipSet
from tutti.plan.files import save_plan
from tutti.plan.plan import Replica
from tutti.train.run.config import TrainConfig, with_changes
from tutti.train.run.planning import prepare
from tutti.train.run.result import TrainResult
from tutti.train.run.trainer import run_local

CLUSTER = """
name: hosts
summary: emulated chips, one per host
chips:
  - name: CPU-host
    vendor: emulated
    architecture: a third of one core
    emulated: true
    slowdown: 1.5
    peak: {{fp32: 40 GFLOP/s, bf16: 40 GFLOP/s}}
    memory_bytes: 4 GiB
    memory_bandwidth: 4 GB/s
    launch_overhead_s: 20 us
    watts: 10 W
nodes:
  - name: host
    chip: CPU-host
    num_chips: 1
    nics: {{rate: 10 Gb/s}}
    host: {{cores: 2, memory_bytes: 16 GiB, memory_bandwidth: 16 GB/s, device_bandwidth: 4 GB/s,
            numa_nodes: 1}}
pools:
  - {{name: box, node: host, nodes: {nodes}}}
"""
CLOCK = """
import time
now, now_ns = time.time, time.time_ns
time.time = lambda: now() + {seconds}
time.time_ns = lambda: now_ns() + int({seconds} * 1e9)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Hosts:
    """A job whose chips are on several hosts."""

    folder: Path
    nodes: int
    port: int = field(default_factory=free_port)
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)
    before: Sequence[str] = ()  # of each command, such as a namespace's
    join: str = ""  # where agents join, if not at the leader's port here

    def __post_init__(self) -> None:
        (self.folder / "model").mkdir()
        files.write_text(self.folder / "model" / "config.json", json.dumps(MODEL))
        files.write_text(self.folder / "cluster.yaml", CLUSTER.format(nodes=self.nodes))
        cluster = Cluster.load(str(self.folder / "cluster.yaml"))
        spec = load_model(str(self.folder / "model"))
        for count in range(1, self.nodes + 1):
            chips = ChipSet.of(f"box/0-{count - 1}/0" if count > 1 else "box/0/0")
            plan = plan_of(cluster, [[Replica(chips=chips, count=count)]], spec)
            save_plan(plan, self.folder / f"alike-{count}.json")
        if self.nodes > 1:
            stages = [[Replica(chips=ChipSet.of(f"box/{n}/0"))] for n in range(2)]
            save_plan(plan_of(cluster, stages, spec), self.folder / "staged.json")
        files.write_text(self.folder / "train.yaml", CONFIG)

    def config(self, name: str, plan: str, **changes: Any) -> TrainConfig:
        config = TrainConfig.load(self.folder / "train.yaml")
        given = {
            "output": str(self.folder / name), "plan": str(self.folder / plan),
            "cluster": str(self.folder / "cluster.yaml"), "checkpoints.huggingface": False,
        }  # fmt: skip
        return with_changes(config, {**given, **changes})

    def train(
        self, name: str, plan: str, *, elastic: dict[str, Any] | None = None, **changes: Any
    ) -> TrainResult:
        """Train; with `elastic`, as the first of several hosts."""
        if elastic is not None:
            listen = {"listen": f"127.0.0.1:{self.port}", **elastic}
            changes = {**changes, "elastic": listen}
        return run_local(prepare(self.config(name, plan, **changes)))

    def replayed(self, name: str, steps: int) -> list[float]:
        """Return the losses of an elastic run's plans, one after the other, without a fault.

        Each plan makes the steps that its generation made, from a checkpoint of the one before.
        """
        parts = list[tuple[int, str]]()
        for entry in read_journal(self.folder / name):
            if entry.phase == "entering":
                first = entry.step or 0
                parts = [*(part for part in parts if part[0] < first), (first, entry.plan)]
        parts = [part for part in parts if part[0] < steps]
        ends = [*(first for first, _ in parts[1:]), steps]
        losses = list[float]()
        for (first, plan), end in zip(parts, ends, strict=True):
            again = f"{name}-again"
            config = self.config(again, f"{name}/{plan}", steps=end)
            found = run_local(prepare(config), resume=bool(losses))
            assert first + len(found.losses) == end
            losses += found.losses
        return losses

    def agent(self, node: int, name: str, *, clock_s: float = 0.0) -> subprocess.Popen[bytes]:
        """Start the agent of a node, whose clock may be so far ahead of the others'."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if clock_s:
            (self.folder / f"clock-{node}").mkdir(exist_ok=True)
            text = CLOCK.format(seconds=clock_s)
            files.write_text(self.folder / f"clock-{node}" / "sitecustomize.py", text)
            paths = [str(self.folder / f"clock-{node}"), os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        log = (self.folder / f"agent-{node}.log").open("ab")
        made = subprocess.Popen(
            [*self.before, *TUTTI, "agent", "--join", self.join or f"127.0.0.1:{self.port}",
             "--node", f"box/{node}", "--run", str(self.folder / name)],
            stdout=log, stderr=log, env=environment,
        )  # fmt: skip
        log.close()
        self.agents.append(made)
        return made

    def leader(
        self, name: str, plan: str, *options: str, **changes: Any
    ) -> subprocess.Popen[bytes]:
        """Start `tutti train` as the first host."""
        elastic = {"listen": f"127.0.0.1:{self.port}", **changes.pop("elastic", {})}
        config = self.config(name, plan, **{**changes, "elastic": elastic})
        files.write_text(self.folder / f"{name}.yaml", json.dumps(plain(config)))
        log = (self.folder / "leader.log").open("ab")
        made = subprocess.Popen(
            [*self.before, *TUTTI, "train", str(self.folder / f"{name}.yaml"), *options],
            stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        log.close()
        self.agents.append(made)
        return made

    def close(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                agent.kill()
            agent.wait()
