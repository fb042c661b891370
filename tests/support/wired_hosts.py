"""Hosts of one timed chip each in namespaces, whose wires have a rate that may change."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.train_job import CONFIG, MODEL, TUTTI
from tutti import files
from tutti.bench.emulated_network import Bed, BedSpec, address
from tutti.document import plain
from tutti.train.run.config import TrainConfig, with_changes
from tutti.train.run.planning import Job, prepare

CLUSTER = """
name: wired
summary: timed chips, one per host
chips:
  - name: Timed
    vendor: emulated
    architecture: declared time
    emulated: true
    peak: {{fp32: {unit} MFLOP/s, bf16: {unit} MFLOP/s}}
    memory_bytes: 4 GiB
    memory_bandwidth: 40 GB/s
    launch_overhead_s: 1 us
nodes:
  - name: host
    chip: Timed
    num_chips: 1
    nics: {{rate: {rate} Mb/s}}
    host: {{cores: 2, memory_bytes: 16 GiB, memory_bandwidth: 16 GB/s, device_bandwidth: 4 GB/s,
            numa_nodes: 1}}
pools:
  - {{name: box, node: host, nodes: {hosts}}}
"""
WIDE = {**MODEL, "hidden_size": 128, "intermediate_size": 256}
JOB = {"global_batch": 9, "sequence_length": 32, "precision": "fp32", "tp_max": 1, "max_stages": 3}
PORT = 29517
_BURST, _QUEUE = 16384, 1 << 18


class WiredHosts:
    """A job on hosts that reach each other by wires of some Mbit/s."""

    def __init__(self, folder: Path, hosts: int, unit: int, rate: float) -> None:
        """Write the job's files; a chip does `unit` MFLOP/s."""
        self.folder, self.rate = folder, rate
        (folder / "model").mkdir()
        files.write_text(folder / "model" / "config.json", json.dumps(WIDE))
        text = CLUSTER.format(unit=unit, rate=rate, hosts=hosts)
        files.write_text(folder / "cluster.yaml", text)
        files.write_text(folder / "train.yaml", CONFIG)
        self.bed = Bed(BedSpec(name="wired", nics=((rate,),) * hosts))
        self._started: list[subprocess.Popen[bytes]] = []
        for host in range(hosts):
            self.wire(host, rate)

    def job(self, name: str, **changes: Any) -> Job:
        """Return a job of which the first host leads."""
        elastic = {"listen": f"{address(0, 0)}:{PORT}", "death_after_s": 6.0}
        given = {
            "output": str(self.folder / name), "plan": None, "job": JOB, "elastic": elastic,
            "cluster": str(self.folder / "cluster.yaml"), "checkpoints.huggingface": False,
        }  # fmt: skip
        config = TrainConfig.load(self.folder / "train.yaml")
        return prepare(with_changes(config, {**given, **changes}))

    def start(self, job: Job) -> None:
        """Start the leader and the agents of the other hosts."""
        config = self.folder / f"{job.config.folder.name}.json"
        files.write_text(config, json.dumps(plain(job.config)))
        self._run(0, ["train", str(config)])
        for host in range(1, len(self.bed.spec.nics)):
            join = ["--join", f"{address(0, 0)}:{PORT}", "--node", f"box/{host}"]
            self._run(host, ["agent", *join, "--run", str(job.config.folder)])

    def wire(self, host: int, rate: float) -> None:
        """Let a host's wire run at a rate, both ways."""
        self._limit(self.bed.holders[1 + host], "nic0", rate)
        self._limit(self.bed.holders[0], f"port{host}.0", rate)

    def finish(self) -> None:
        """Let the job end after the step at hand."""
        self._started[0].send_signal(signal.SIGTERM)
        for process in self._started:
            process.wait(60)

    def close(self) -> None:
        """End what still runs, and remove the wires."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()
        self.bed.close()

    def _limit(self, holder: int, device: str, rate: float) -> None:
        line = f"qdisc replace dev {device} root tbf rate {rate}mbit burst {_BURST} limit {_QUEUE}"
        self.bed.inside(holder, ["tc", "-batch", "-"], [line])

    def _run(self, host: int, command: Sequence[str]) -> None:
        space = f"--net=/proc/{self.bed.holders[1 + host]}/ns/net"
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "TUTTI_COMM_ADDRESSES": address(host, 0)
        }  # fmt: skip
        with (self.folder / f"host-{host}.log").open("ab") as log:
            self._started.append(
                subprocess.Popen(
                    ["nsenter", space, *TUTTI, *command], stdout=log, stderr=log, env=environment
                )
            )
