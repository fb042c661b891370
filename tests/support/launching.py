"""A plan whose ranks lie criss-cross over three pools; schedulers that are a few shell lines."""

from __future__ import annotations

import itertools
import os
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

from tests.support.plans import small_model
from tutti.document import Place, build
from tutti.hardware.cluster import Cluster
from tutti.launch.facts import Facts
from tutti.launch.job import Job as LaunchJob
from tutti.models.spec import ModelSpec
from tutti.plan.check import require_valid
from tutti.plan.chips import ChipSet
from tutti.plan.files import refer_to_cluster, refer_to_model
from tutti.plan.job import PRECISIONS, Job
from tutti.plan.plan import Pipeline, Plan, Replica, Stage

POOLS = [
    {"name": "h100", "chip": "H100", "nodes": 1},
    {"name": "a100", "chip": "A100-80", "nodes": 2},
    {"name": "p800", "chip": "Kunlun-P800", "nodes": 1},
    {"name": "unused", "chip": "Ascend-910B2", "nodes": 4},
]


def plan_of(
    cluster: Cluster,
    stages: list[list[Replica]],
    model: ModelSpec | None = None,
    **others: object,
) -> Plan:
    """Return a valid plan of one pipeline: half of the layers on each of two stages."""
    model = model or small_model(4)
    cuts = [round(k * model.num_units / len(stages)) for k in range(len(stages) + 1)]
    if len(stages) == 2:
        cuts[1] = 3
    units = tuple(itertools.pairwise(cuts))
    micro_batch = sum(replica.count * replica.sequences for replica in stages[0])
    plan = Plan(
        model=refer_to_model(model),
        cluster=refer_to_cluster(cluster),
        job=Job(sequence_length=64, global_batch=2 * micro_batch, precision=PRECISIONS["fp32"]),
        pipelines=(
            Pipeline(
                micro_batch=micro_batch,
                micro_batches=2,
                stages=tuple(
                    Stage(units=(span,), replicas=tuple(replicas))
                    for span, replicas in zip(units, stages, strict=True)
                ),
            ),
        ),
        **others,  # type: ignore[arg-type]
    )
    require_valid(plan)
    return plan


def crossed_plan() -> Plan:
    """Rank 0 on a pool's second node, one node on both stages, idle and spare chips."""
    cluster = Cluster.from_document({"name": "mixed", "pools": POOLS}, Place("mixed"))
    return plan_of(
        cluster,
        [
            [
                Replica(chips=ChipSet.of("a100/1/0-7"), tp=2, count=4),
                Replica(chips=ChipSet.of("h100/0/0-1"), tp=2),
                Replica(chips=ChipSet.of("a100/0/0-5"), tp=2, count=3),
            ],
            [
                Replica(chips=ChipSet.of("p800/0/0-7"), tp=2, count=4),
                Replica(chips=ChipSet.of("h100/0/4-5"), tp=2, sequences=4),
            ],
        ],
        spare=ChipSet.of("a100/0/6-7"),
        idle=ChipSet.of("h100/0/2-3", "h100/0/6-7", "unused/0-3/0-7"),
    )


def three_makers_plan() -> Plan:
    """One node each of three makers' chips."""
    cluster = Cluster.from_document({"name": "mixed", "pools": POOLS}, Place("mixed"))
    first = [
        Replica(chips=ChipSet.of(f"{pool}/0/0-7"), tp=4, count=2) for pool in ("h100", "unused")
    ]
    second = [Replica(chips=ChipSet.of("p800/0/0-7"), tp=2, count=4)]
    idle = ChipSet.of("a100/0-1/0-7", "unused/1-3/0-7")
    return plan_of(cluster, [first, second], idle=idle)


IMAGES = {
    "h100": {"image": "registry.example/tutti:cuda", "partition": "new"},
    "a100": {"image": "registry.example/tutti:cuda", "partition": "old"},
    "p800": {"image": "registry.example/tutti:kunlun", "partition": "xpu"},
}


def facts_of(document: object) -> Facts:
    """Return launch facts as a file would give them."""
    return build(Facts, document, Place("launch.yaml"))


def crossed_job(**facts: object) -> LaunchJob:
    """Return the plan above as a job, with images."""
    return LaunchJob.of(crossed_plan(), facts_of({"pools": IMAGES, **facts}), config="steps: 10\n")


def three_makers_job() -> LaunchJob:
    """Return that plan as a job."""
    images = {**IMAGES, "unused": {"image": "registry.example/tutti:ascend"}}
    return LaunchJob.of(three_makers_plan(), facts_of({"pools": images}))


class Started(NamedTuple):
    """What a torchrun was started with."""

    node: str
    node_rank: int
    processes: int
    words: list[str]
    environment: dict[str, str]


class FakeHosts:
    """Programs first on the PATH: a torchrun that writes down how it was called, a small Slurm."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.calls = folder / "calls"
        self.bin.mkdir(parents=True)
        self.calls.mkdir()
        self.add(
            "torchrun",
            f'out={shlex.quote(str(self.calls))}/"${{TUTTI_NODE//\\//_}}"\n'
            'printf "%s\\n" "$@" >"$out.words"; env -0 >"$out.env"; pwd >"$out.pwd"\n'
            # who fails ends the others: not before so many have begun the attempt
            f'began={shlex.quote(str(folder / "began"))}/"${{TUTTI_ATTEMPT:-0}}"\n'
            'mkdir -p "$began"; : >"$began/${TUTTI_NODE//\\//_}"\n'
            "for _ in {1..300}; do\n"
            '  here=("$began"/*); [ "${#here[@]}" -ge "${FAKE_TOGETHER:-1}" ] && break; sleep .1\n'
            "done\n"
            'exit "${FAKE_STATUS:-0}"',
        )

    def add(self, name: str, lines: str) -> None:
        """Add a program."""
        path = self.bin / name
        path.write_text(f"#!/usr/bin/env bash\n{lines}\n", encoding="utf-8")
        path.chmod(0o755)

    def run(self, command: list[str], folder: Path, **variables: str) -> tuple[int, str]:
        """Run a command with these programs in front; return its status and all output."""
        environ = {**os.environ, **variables, "PATH": f"{self.bin}:{os.environ['PATH']}"}
        done = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stdout + done.stderr

    def started(self) -> list[Started]:
        """Return every torchrun that was started, by its node rank."""
        found = []
        for path in self.calls.glob("*.words"):
            words = path.read_text(encoding="utf-8").splitlines()
            text = path.with_suffix(".env").read_text(encoding="utf-8")
            environment = dict(line.split("=", 1) for line in text.split("\0") if "=" in line)
            options = dict(w.split("=", 1) for w in words if w.startswith("--") and "=" in w)
            found.append(
                Started(
                    node=environment["TUTTI_NODE"],
                    node_rank=int(options["--node-rank"]),
                    processes=int(options["--nproc-per-node"]),
                    words=words,
                    environment=environment,
                )
            )
        return sorted(found, key=lambda started: started.node_rank)
