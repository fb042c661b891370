"""Emulated chips of speeds 4:4:2:1 in an elastic run, and somebody beside it who acts and looks."""

from __future__ import annotations

import json
import os
import signal
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.train_job import CONFIG, MODEL
from tutti import files
from tutti.elastic.journal import Entry, read_journal
from tutti.errors import InputError
from tutti.train.run.config import TrainConfig, with_changes
from tutti.train.run.planning import Job, prepare
from tutti.train.run.trainer import run_local

SPEEDS = {"fast": 4, "middle": 2, "slow": 1}
CHIP = """
  - name: Timed-{speed}
    vendor: emulated
    architecture: declared time
    emulated: true
    peak: {{fp32: {rate} MFLOP/s, bf16: {rate} MFLOP/s}}
    memory_bytes: 4 GiB
    memory_bandwidth: {speed}0 GB/s
    launch_overhead_s: 1 us
"""
NODE = """
  - name: timed-{pool}
    chip: Timed-{speed}
    num_chips: {chips}
    bridge: {{bandwidth: 1 GB/s, latency_s: 50 us}}
    host: {{cores: 2, memory_bytes: 16 GiB, memory_bandwidth: 16 GB/s, device_bandwidth: 4 GB/s,
            numa_nodes: 1}}
"""
UNIT = 10_000  # MFLOP/s of the slowest
JOB = {"global_batch": 44, "sequence_length": 64, "precision": "fp32", "tp_max": 1, "max_stages": 1}


def write(folder: Path, unit: int = UNIT) -> None:
    """Write model, cluster and training file; the slowest chip does `unit` MFLOP/s."""
    pairs = [("fast", "middle"), ("fast", "slow"), ("middle", "slow")]
    links = "\n".join(
        f"    - {{pools: [{a}, {b}], bandwidth: 1 GB/s, latency_s: 50 us, same_host: true}}"
        for a, b in pairs
    )
    text = "name: timed\nsummary: timed chips\nchips:"
    text += "".join(CHIP.format(speed=s, rate=s * unit) for s in SPEEDS.values()) + "nodes:"
    text += "".join(
        NODE.format(pool=pool, speed=speed, chips=2 if pool == "fast" else 1)
        for pool, speed in SPEEDS.items()
    )
    text += "pools:\n" + "".join(f"  - {{name: {p}, node: timed-{p}}}\n" for p in SPEEDS)
    files.write_text(folder / "cluster.yaml", f"{text}fabric:\n  links:\n{links}\n")
    (folder / "model").mkdir()
    files.write_text(folder / "model" / "config.json", json.dumps(MODEL))
    files.write_text(folder / "train.yaml", CONFIG)


@dataclass
class Watched:
    """A run, as somebody beside it sees it."""

    folder: Path
    marks: dict[str, tuple[int, int]] = field(default_factory=dict)

    def entries(self) -> list[Entry]:
        try:
            return read_journal(self.folder)
        except InputError:
            return []

    def records(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        if not path.is_file():
            return []
        lines = path.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def until(self, what: Callable[[], Any], limit_s: float = 400.0) -> None:
        limit = time.monotonic() + limit_s
        while not what():
            assert time.monotonic() < limit, [e.why for e in self.entries()][-3:]
            time.sleep(0.1)

    def steps(self, name: str, count: int = 8) -> None:
        """Let some steps pass, and remember which they were; the first may be compiling."""
        first = len(self.records()) + 1
        self.until(lambda: len(self.records()) >= first + count)
        self.marks[name] = (first, first + count)

    def noted(self, *phases: str) -> list[Entry]:
        """Return the decisions of some kinds."""
        return [entry for entry in self.entries() if entry.phase in phases]

    def decided(self, *phases: str, after: int) -> None:
        """Wait for a decision that comes after so many."""
        self.until(lambda: any(e.phase in phases for e in self.entries()[after:]))

    def marked(self, name: str) -> list[dict[str, Any]]:
        first, last = self.marks[name]
        return self.records()[first:last]

    def emulation(self, name: str) -> Emulation:
        return emulation(self.records(), *self.marks[name])

    def step_s(self, name: str) -> float:
        return statistics.median(float(r["seconds"]) for r in self.marked(name))


@dataclass(frozen=True)
class Emulation:
    """What steps were due to take on the slowest pool's chips, and what the host made of it."""

    due_s: float  # to compute, median over steps; a machine that is too slow does not add to it
    overrun: float  # of the worst pool over these steps


def emulation(records: list[dict[str, Any]], first: int = 0, last: int | None = None) -> Emulation:
    """Return it of the records from `first` to `last`.

    The overrun of a record is that of its process from its beginning on, so `records` must begin
    where the run began.
    """
    took, due = defaultdict[str, float](float), defaultdict[str, float](float)
    slowest, sums = list[float](), defaultdict[str, list[float]](lambda: [0.0, 0.0])
    for number, record in enumerate(records[:last]):
        of_step = list[float]()
        for name, pool in record.get("pools", {}).items():  # one that was told late has none
            took[name] += pool["compute_s"]
            before, due[name] = due[name], took[name] / (1 + pool["overrun"])
            of_step.append(due[name] - before)
            if number >= first:
                sums[name][0] += pool["compute_s"]
                sums[name][1] += of_step[-1]
        if of_step and number >= first:
            slowest.append(max(of_step))
    worst = max(max(took_s / due_s - 1, 0.0) for took_s, due_s in sums.values())
    return Emulation(statistics.median(slowest), worst)


def job_of(folder: Path, name: str, **changes: Any) -> Job:
    config = with_changes(
        TrainConfig.load(folder / "train.yaml"),
        {
            "output": str(folder / name), "plan": None, "cluster": str(folder / "cluster.yaml"),
            "checkpoints.huggingface": False, "steps": 600, "job": JOB, **changes,
        },
    )  # fmt: skip
    return prepare(config)


def run_beside(job: Job, watched: Watched, happenings: list[Callable[[], Any]]) -> list[Entry]:
    """Run a job while things happen; then it is asked to end."""
    failed = list[BaseException]()

    def beside() -> None:
        try:
            for happening in happenings:
                happening()
        except BaseException as error:
            failed.append(error)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=beside, daemon=True)
    thread.start()
    run_local(job)
    thread.join()
    assert not failed, failed
    return watched.entries()
