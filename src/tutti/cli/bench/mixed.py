"""`tutti bench mixed`: planned against uniform on emulated chips of unlike speed, truly run.

Chips run on declared time: an instruction takes what the cost model says, messages are real and
nothing is computed. So the figures are of schedules, shares, cuts and the engine's own overhead,
at any load of the host that it can keep up with; the overrun says whether it did.
"""

from __future__ import annotations

import json as json_text
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.cli.shared.progress import ProgressLine
from tutti.cli.shared.torch_needed import require_torch
from tutti.errors import InputError, hint

if TYPE_CHECKING:
    from rich.table import Table

    from tutti.train.run.planning import Job
    from tutti.train.run.result import TrainResult

LAYERS = 28  # cut 21:7 and 16:8:4
LENGTH = 64
TOO_SMALL = 1.85e9  # bytes: a runtime and most of the model, so that it has to be cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A cluster and how the work may be shared out."""

    cluster: str
    memory_bytes: float | None = None  # of each chip, where that decides what can be done
    batch: int  # sequences of a step, which are its micro-batches; 16 to 32 of them for a chip
    limits: Mapping[str, Any]
    ideal: float  # of planned over uniform, without bubble


INSTANCES: Mapping[str, Instance] = {
    "shares 3:1": Instance(cluster="emulated-3-1", batch=32, limits={"max_stages": 1}, ideal=2.0),
    "cuts 3:1": Instance(
        cluster="emulated-3-1", memory_bytes=TOO_SMALL, batch=32, limits={}, ideal=2.0
    ),
    "shares 4:2:1": Instance(
        cluster="emulated-4-2-1", batch=84, limits={"max_stages": 1}, ideal=7 / 3
    ),
    "cuts 4:2:1": Instance(
        cluster="emulated-4-2-1", memory_bytes=TOO_SMALL, batch=32, limits={}, ideal=7 / 3
    ),
}


def mixed(
    instances: Annotated[
        list[str] | None, typer.Argument(help="Some of: " + ", ".join(INSTANCES))
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of each run.", min=2)] = 3,
    json: Json = False,
) -> None:
    """Run planned, uniform and single-pool jobs on emulated chips; compare with the prediction."""
    require_torch("bench mixed")
    for name in instances or ():
        if name not in INSTANCES:
            raise InputError(f"bench mixed: no instance '{name}'; {hint(name, INSTANCES)}")
    rows = []
    with ProgressLine("running", wanted=not json) as line, tempfile.TemporaryDirectory() as scratch:
        for name in instances or INSTANCES:
            runs = Runs(INSTANCES[name], Path(scratch), steps)
            rows.append(_row(name, INSTANCES[name], runs, line))
    if json:
        print_json({"rows": rows})
    else:
        print_rich(_table(rows))


def _config() -> dict[str, Any]:
    return {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 256, "intermediate_size": 1408,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4,
        "max_position_embeddings": LENGTH, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip


class Runs:
    """The jobs of one instance."""

    def __init__(self, instance: Instance, scratch: Path, steps: int) -> None:
        from tutti.hardware.cluster import Cluster

        self._instance, self._steps = instance, steps
        self._scratch = scratch
        self._model = scratch / "model" / "config.json"
        self._model.parent.mkdir(exist_ok=True)
        self._model.write_text(json_text.dumps(_config()), encoding="utf-8")
        self.cluster = Cluster.load(instance.cluster)

    def _cluster(self, *, alone: bool) -> str:
        """Return the cluster's file; a pool alone gets the memory it needs (DESIGN.md §5)."""
        from tutti.document import plain

        memory = self._instance.memory_bytes
        if memory is None or alone:
            return self._instance.cluster
        pools = tuple(
            replace(p, node=replace(p.node, chip=replace(p.node.chip, memory_bytes=memory)))
            for p in self.cluster.pools
        )
        path = self._scratch / f"{self._instance.cluster}.json"
        path.write_text(json_text.dumps(plain(replace(self.cluster, pools=pools))), "utf-8")
        return str(path)

    def job(self, batch: int, **more: Any) -> Job:
        """Return a job, planned."""
        from tutti.document import Place, build
        from tutti.train.run.config import TrainConfig
        from tutti.train.run.planning import prepare

        written = {
            "model": str(self._model),
            "cluster": self._cluster(alone="pools" in more),
            "steps": self._steps,
            "data": {"train": [{"kind": "synthetic"}]},
            "job": {
                "sequence_length": LENGTH, "global_batch": batch, "precision": "fp32",
                "micro_batch": [1], "schedules": ["1f1b"], "shard": [0], "offload": False,
                "recompute": False, **self._instance.limits, **more,
            },
            "emulate": "stub",
            "checkpoints": {"final": False},
            "output": tempfile.mkdtemp(dir=self._scratch),
        }  # fmt: skip
        return prepare(build(TrainConfig, written, Place("bench mixed")))

    def run(self, job: Job) -> tuple[TrainResult, float]:
        """Run a job; return what it came to and the largest overrun of a chip."""
        from tutti.train.run.trainer import run_local

        overrun = 0.0

        def hear(event: Any) -> None:
            nonlocal overrun
            for pool in (event.values.get("pools") or {}).values():
                overrun = max(overrun, float(pool["overrun"]))

        result = run_local(job, listener=hear)
        result.require_finished()
        return result, overrun


def _row(name: str, instance: Instance, runs: Runs, line: ProgressLine) -> dict[str, Any]:
    line.say(f"{name}, planned")
    job = runs.job(instance.batch, use_all_pools=True)
    planned, late = runs.run(job)
    line.say(f"{name}, uniform")
    uniform, late_uniform = runs.run(runs.job(instance.batch, uniform=True, use_all_pools=True))
    alone, lates = 0.0, [late, late_uniform]
    pools = runs.cluster.pools
    whole = sum(p.chip.peak_flops(job.plan.job.precision.compute) for p in pools)
    for pool in pools:
        line.say(f"{name}, {pool.name} alone")
        share = pool.chip.peak_flops(job.plan.job.precision.compute) / whole
        one, overrun = runs.run(
            runs.job(math.ceil(instance.batch * share), pools=[pool.name], max_stages=1)
        )
        alone += one.tokens_per_s
        lates.append(overrun)
    stages = max(len(p.stages) for p in job.plan.pipelines)
    micro = max(p.micro_batches for p in job.plan.pipelines)
    predicted = planned.predicted_s or math.nan
    return {
        "instance": name,
        "planned_s": planned.seconds_per_step,
        "predicted_s": predicted,
        "error": predicted / planned.seconds_per_step - 1.0,
        "uniform_s": uniform.seconds_per_step,
        "speedup": uniform.seconds_per_step / planned.seconds_per_step,
        "ideal": instance.ideal,
        "efficiency": planned.tokens_per_s / alone,
        "bubble_bound": micro / (micro + stages - 1),
        "overrun": max(lates),
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table(title="emulated chips on declared time, real messages")
    names = ("instance", "planned", "predicted", "uniform", "planned over uniform",
             "mixed-chip efficiency", "bubble bound", "overrun")  # fmt: skip
    for name in names:
        table.add_column(name, justify="left" if name == "instance" else "right")
    for row in rows:
        table.add_row(
            row["instance"],
            f"{row['planned_s']:.3f} s",
            f"{row['predicted_s']:.3f} s ({row['error']:+.1%})",
            f"{row['uniform_s']:.3f} s",
            f"{row['speedup']:.2f}× of {row['ideal']:.2f}",
            f"{row['efficiency']:.1%}",
            f"{row['bubble_bound']:.1%}",
            f"{row['overrun']:.1%}",
        )
    return table
