"""A model whose optimizer does not fit trains all the same: what host memory costs in speed.

    python benchmarks/offload_gpu.py --memory 141,24,18      # GB, on a machine with one large GPU
    python benchmarks/offload_gpu.py --rehearse              # the same script on a CPU rank, tiny

The device is profiled once. For each amount of memory the job is planned (the planner decides what
lives on the host), run under that limit, and its step time set beside the prediction; losses must
be those of the run with all of the memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from mixed_gpus import Runs, keep_traces, profiles

from tutti.plan.plan import Plan


def away(plan: Plan) -> dict[str, int]:
    """Return how many units have what on the host, and how many are recomputed."""
    replica = plan.pipelines[0].stages[0].replicas[0]
    found = {
        name: sum(stop - start for start, stop in getattr(replica.offload, name))
        for name in ("optimizer", "parameters", "gradients", "activations")
    }
    for name in ("selective", "full"):
        found[name] = sum(stop - start for start, stop in getattr(replica.recompute, name))
    return {name: count for name, count in found.items() if count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", default="141,24,18", help="GB, the first with room for all")
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--profile-s", type=int, default=30)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--profiles", default="", help="keep the profile here, or use it")
    parser.add_argument("--traces", default="", help="keep a trace of each run here")
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    first: tuple[float, ...] = ()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        kept = Path(args.profiles or scratch)
        kept.mkdir(parents=True, exist_ok=True)
        measured = profiles([100], kept, args)
        for amount in args.memory.split(","):
            own = scratch / amount
            own.mkdir()
            runs = Runs(own, args, [100], float(amount) * 1e9)
            runs.profiles = measured
            traced = [4] if args.traces else []
            job = runs.job("run", args.batch, args.steps, offload=True, trace_steps=traced)
            done = runs.run(job)
            keep_traces(own / "run", args.traces, amount)
            first = first or done.losses
            row = {
                "memory_gb": float(amount) * 0.93,
                "host": away(job.plan),
                "measured_s": done.seconds_per_step,
                "predicted_s": done.predicted_s,
                "losses": done.losses,
                "largest_loss_difference": max(
                    abs(a - b) for a, b in zip(first, done.losses, strict=True)
                ),
            }
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    for row in rows:
        row["slowdown"] = float(row["measured_s"]) / float(rows[0]["measured_s"])  # type: ignore[arg-type]
        row["predicted_slowdown"] = float(row["predicted_s"]) / float(rows[0]["predicted_s"])  # type: ignore[arg-type]
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
