"""Faults of every kind in elastic runs: who is named, how soon, and when training goes on.

    python -m benchmarks.elastic_faults [--kinds kill,stop,…] [--times 2] [--ranks 4]

A tiny model in one pipeline of emulated chips (no replica: each stage's state is needed), copies
after every step, `timeout_s` 300. Faults come one after the other at alternating ranks. Prints for
every kind how often the right rank was named, the time from the fault to the verdict, and to the
first step that all made after it; at the end, whether the losses are those of an undisturbed run.
Chips share this machine's cores: a busy machine makes every time longer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.elastic_hosts import CLUSTER
from tests.support.launching import plan_of
from tests.support.train_job import CONFIG, MODEL
from tutti.elastic.journal import FOLDER, read_journal
from tutti.files import write_text
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.observe.folder import METRICS
from tutti.plan.chips import ChipSet
from tutti.plan.files import save_plan
from tutti.plan.plan import Replica
from tutti.train.run.config import TrainConfig, with_changes
from tutti.train.run.planning import prepare
from tutti.train.run.result import TrainResult
from tutti.train.run.trainer import run_local

DEATHS = ("kill", "terminate", "abort", "segfault", "exception")
HANGS = ("stop", "sleep", "spin", "file", "data", "operation", "size")
BETWEEN = 3  # steps from one fault to the next


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One fault, as it was noticed."""

    kind: str
    rank: int
    named: str  # the verdict
    right: bool
    verdict_s: float
    again_s: float
    next_step_s: float  # to the end of the first step after it


def write_job(folder: Path, ranks: int) -> None:
    """Write a job whose pipeline has a stage on each of some emulated chips."""
    (folder / "model").mkdir()
    write_text(folder / "model" / "config.json", json.dumps(MODEL))
    write_text(folder / "cluster.yaml", CLUSTER.format(nodes=ranks))
    cluster, spec = Cluster.load(str(folder / "cluster.yaml")), load_model(str(folder / "model"))
    stages = [[Replica(chips=ChipSet.of(f"box/{n}/0"))] for n in range(ranks)]
    save_plan(plan_of(cluster, stages, spec), folder / "plan.json")
    write_text(folder / "train.yaml", CONFIG)


def run(folder: Path, name: str, **changes: Any) -> TrainResult:
    """Train."""
    config = TrainConfig.load(folder / "train.yaml")
    given = {
        "output": str(folder / name), "plan": str(folder / "plan.json"),
        "cluster": str(folder / "cluster.yaml"), "checkpoints.huggingface": False,
    }  # fmt: skip
    return run_local(prepare(with_changes(config, {**given, **changes})))


def outcomes(folder: Path, drills: list[dict[str, Any]]) -> list[Outcome]:
    """Return what became of every fault, from the run's log."""
    entries, found = read_journal(folder), list[Outcome]()
    lines = (folder / METRICS).read_text(encoding="utf-8").splitlines()
    seconds = {r["step"]: float(r["seconds"]) for r in map(json.loads, lines)}
    for number, drill in enumerate(drills):
        mark = folder / FOLDER / f"drill-{number}"
        if not mark.is_file():
            continue
        at = float(mark.read_text(encoding="ascii"))
        after = [entry for entry in entries if entry.at >= at]
        # who lost the others is heard of first; who was lost is said when all have left
        verdict = next((e for e in after if e.phase == "settling"), None)
        running = next((e for e in after if e.phase == "running"), None)
        entering = next((e for e in after if e.phase == "entering"), None)
        if verdict is None or running is None or entering is None:
            continue
        step_s = seconds.get((entering.step or 0) + 1, 0.0)
        found.append(
            Outcome(
                kind=drill["fault"],
                rank=drill["rank"],
                named=verdict.why,
                right=verdict.why.startswith(f"rank {drill['rank']} "),
                verdict_s=verdict.at - at,
                again_s=running.at - at,
                next_step_s=running.at - at + step_s,
            )
        )
    return found


def main() -> None:
    """Run the faults, and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default=",".join((*DEATHS, *HANGS)))
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    kinds = given.kinds.split(",")
    drills = [
        {"fault": kind, "rank": n % given.ranks, "step": 3 + BETWEEN * n, "instruction": 2 + n % 5}
        for n, kind in enumerate(kind for kind in kinds for _ in range(given.times))
    ]
    last = 3 + BETWEEN * len(drills) + 2
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_job(folder, given.ranks)
        elastic = {"copies": 1, "replan": "never", "drill": drills}
        result = run(folder, "run", steps=last, elastic=elastic)
        plain = run(folder, "plain", steps=last)
        found = outcomes(folder / "run", drills)
    for kind in kinds:
        own = [outcome for outcome in found if outcome.kind == kind]
        right = sum(outcome.right for outcome in own)
        print(f"{kind}: {len(own)} of {given.times} went on, {right} named right", end="")
        if own:
            verdict = [outcome.verdict_s for outcome in own]
            again = [outcome.again_s for outcome in own]
            steps = [outcome.next_step_s for outcome in own]
            print(
                f"; named after {statistics.median(verdict):.2f} s (at most {max(verdict):.2f}), "
                f"running again after {statistics.median(again):.2f} s (at most {max(again):.2f}), "
                f"end of the next step after {statistics.median(steps):.2f} s (at most "
                f"{max(steps):.2f})"
            )
        for outcome in own:
            print(f"    rank {outcome.rank}: {outcome.named}")
    print(f"losses as undisturbed: {result.losses == plain.losses} ({len(result.losses)} steps)")


if __name__ == "__main__":
    main()
