"""Elastic training on parts of one GPU: a part is killed, the others wait for it, all go on.

    python -m benchmarks.elastic_gpu --model llama-3.2-1b        # on a machine with one large GPU
    python -m benchmarks.elastic_gpu --rehearse                  # the same on CPU ranks, tiny

MPS splits the GPU into chips of 50, 25 and 25 % that run at the same time. Four runs of the same
samples: undisturbed without `elastic:`; elastic without copies; with copies; with copies and parts
that are killed. Prints the time from each kill to the end of the next step, and until the killed
part trains again; what copies cost, as time of all steps but those until two were taken; and the
largest difference of a loss to the undisturbed run. Times are of this process's clock: events come
through the controller, so they are no shorter than what happened.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.mixed_gpus import NAMES, cluster_text, limits, say, shared_device
from tutti.document import Place, build
from tutti.elastic.journal import FOLDER, read_journal
from tutti.train.run.config import TrainConfig
from tutti.train.run.planning import Job, prepare
from tutti.train.run.trainer import run_local

WARM = 3  # steps that do not count


@dataclass
class Told:
    """A run, as its events came."""

    job: Job
    steps: dict[int, float] = field(default_factory=dict)  # when each ended
    seconds: dict[int, float] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)

    def hear(self, event: Any) -> None:
        if event.kind == "step":
            step = int(event.values["step"])
            self.steps.setdefault(step, time.time())
            self.seconds[step] = float(event.values["seconds"])
            self.losses[step] = float(event.values["loss"])
        elif event.kind in ("notice", "warning"):
            say(event.values["text"])

    first: int = WARM  # the last step that does not count

    @property
    def mean_s(self) -> float:
        """Seconds of a step, the first ones apart; copies are in it."""
        return statistics.fmean(s for step, s in self.seconds.items() if step > self.first)

    def beside_copies(self, every: int) -> float:
        """What copies add, by steps of this run alone: those beside one, against the others."""
        after = [s for n, s in self.seconds.items() if n > self.first and n % every == 1]
        others = [s for n, s in self.seconds.items() if n > self.first and n % every != 1]
        plain = statistics.fmean(others)
        return (statistics.fmean(after) / plain - 1) / every if after else float("nan")


def job_of(
    scratch: Path, name: str, args: argparse.Namespace, elastic: dict[str, Any] | None
) -> Job:
    """Return a job on all parts."""
    written = {
        "model": args.model, "cluster": str(scratch / "cluster.yaml"), "steps": args.steps,
        "job": {
            "sequence_length": args.length, "global_batch": args.batch, "offload": False,
            "precision": "fp32" if args.rehearse else "bf16", "use_all_pools": True,
        },
        "data": {"train": [{"kind": "synthetic", "vocabulary": args.vocabulary}]},
        "start": "random", "optimizer": {"learning_rate": 3e-4, "schedule": "constant"},
        "checkpoints": {"final": False}, "output": str(scratch / name),
    }  # fmt: skip
    if elastic is not None:
        written["elastic"] = {"replan": "never", **elastic}
    return prepare(build(TrainConfig, written, Place(name)))


def run(scratch: Path, name: str, args: argparse.Namespace, elastic: dict[str, Any] | None) -> Told:
    """Run a job on the parts."""
    parts = [int(part) for part in args.parts.split(",")]
    of = dict(zip(NAMES, parts, strict=False))
    # memory of the first two copies is pinned beside steps that do not count either
    told = Told(job_of(scratch, name, args, elastic), first=WARM + 2 * args.copies)
    chips = [c for _, _, s in told.job.plan.stages() for r in s.replicas for c in r.chips]
    few = {"OMP_NUM_THREADS": "1" if args.rehearse else "4"}
    environment = {rank: few | limits(of[chip.pool]) for rank, chip in enumerate(chips)}
    run_local(told.job, environment=environment, listener=told.hear, overwrite=True)
    say(f"{name}: {told.mean_s:.4f} s a step, loss {told.losses[max(told.losses)]:.4f}")
    return told


def kills(told: Told, drills: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what became of every kill."""
    folder, found = told.job.config.folder, []
    entries = read_journal(folder)
    for number, drill in enumerate(drills):
        mark = folder / FOLDER / f"drill-{number}"
        if not mark.is_file():
            found.append({**drill, "happened": False})
            continue
        at = float(mark.read_text(encoding="ascii"))
        # the step that the kill fell into ends when all are back; earlier ones may be told late
        ended = [w for step, w in told.steps.items() if w > at and step >= drill["step"]]
        again = min(ended, default=None)
        running = next((e.at for e in entries if e.at > at and e.phase == "running"), None)
        found.append({
            "rank": drill["rank"], "step": drill["step"],
            "next_step_s": None if again is None else again - at,
            "rejoined_s": None if running is None else running - at,
            "source": [e.why for e in entries if e.at > at and e.phase == "entering"][:1],
        })  # fmt: skip
    return found


def illegal(folder: Path) -> list[str]:
    """Return the logs of ranks that had an illegal memory access."""
    logs = sorted(folder.glob("logs/**/*.log"))
    return [str(log.relative_to(folder)) for log in logs if "illegal memory" in log.read_text()]


def measure(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Make the four runs."""
    parts = [int(part) for part in args.parts.split(",")]
    (scratch / "cluster.yaml").write_text(cluster_text(parts, rehearse=args.rehearse))
    drills = [
        {
            "fault": "kill",
            "rank": rank,
            "step": 2 * WARM + 6 * n,
            "instruction": args.instruction,
        }
        for n, rank in enumerate(args.victims)
    ]
    if args.only_kills:
        killed = run(scratch, "killed", args, {"copies": 1, "drill": drills})
        return {"kills": kills(killed, drills), "illegal": illegal(killed.job.config.folder)}
    plain = run(scratch, "plain", args, None)
    bare = run(scratch, "bare", args, {})
    copied = run(scratch, "copied", args, {"copies": args.copies})
    killed = run(scratch, "killed", args, {"copies": 1, "drill": drills})
    apart = [
        abs(killed.losses[s] / plain.losses[s] - 1) for s in plain.losses if s in killed.losses
    ]
    return {
        "model": args.model, "parts": parts, "batch": args.batch, "length": args.length,
        "plain_step_s": plain.mean_s, "elastic_step_s": bare.mean_s, "copied_step_s": copied.mean_s,
        "elastic_costs": bare.mean_s / plain.mean_s - 1,
        "copies_cost": copied.mean_s / bare.mean_s - 1, "copies_every": args.copies,
        "copies_cost_in_one_run": copied.beside_copies(args.copies),
        "kills": kills(killed, drills), "illegal": illegal(killed.job.config.folder),
        "largest_loss_difference": max(apart),
        "losses_compared": len(apart),
    }  # fmt: skip


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--parts", default="50,25,25")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=44)
    parser.add_argument("--copies", type=int, default=10)
    parser.add_argument(
        "--victims", type=lambda text: [int(n) for n in text.split(",")], default=[2, 1, 2]
    )
    parser.add_argument("--instruction", type=int, default=4, help="at which a part is killed")
    parser.add_argument("--turns", action="store_true", help="no MPS: processes take turns")
    parser.add_argument("--logs", action="store_true", help="print what ranks wrote, at the end")
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--only-kills", action="store_true", help="the run with kills alone")
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        if args.rehearse:
            args.model, args.length, args.batch = str(tiny(scratch)), 32, 8
        alone = args.rehearse or args.turns
        with contextlib.nullcontext() if alone else shared_device(scratch):
            try:
                print(json.dumps(measure(args, scratch), indent=1))
            except BaseException:
                args.logs = True
                raise
            finally:
                wrote = [*scratch.glob("*/logs/**/*.log"), *scratch.glob("log/*.log")]
                for log in sorted(wrote) if args.logs else ():
                    say(f"--- {log.relative_to(scratch)}\n{log.read_text()[-9000:]}")


def tiny(scratch: Path) -> Path:
    """Write a model that CPU ranks can train."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320,
        "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip
    (scratch / "model").mkdir()
    (scratch / "model" / "config.json").write_text(json.dumps(config))
    return scratch / "model"


if __name__ == "__main__":
    main()
