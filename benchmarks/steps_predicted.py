"""Whole training steps on this chip beside what its shipped profile predicts of them.

    python benchmarks/steps_predicted.py [MODEL[:LAYERS] …] [--batches 1x2048,4x2048] [--json]

Five models, dense ones and ones with experts, each at three batch sizes; none of them was profiled
as a whole, and their shapes are between those of the profile's grid.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from tutti.bench.training.question import SpeedQuestion
from tutti.bench.training.speed import our_speed

MODELS = ("qwen3-8b:18", "llama-3.2-3b", "gemma-2-2b", "qwen3-30b-a3b:12", "deepseek-v2-lite:8")
BATCHES = "1x2048,1x4096,4x2048"  # sequences, tokens of each


def questions(names: list[str], batches: str) -> list[SpeedQuestion]:
    """Return what is timed."""
    asked = []
    for name in names:
        model, _, layers = name.partition(":")
        for batch in batches.split(","):
            sequences, length = map(int, batch.split("x"))
            asked.append(
                SpeedQuestion(
                    model=model,
                    device=None,
                    micro_batch=sequences,
                    sequence_length=length,
                    layers=int(layers) if layers else None,
                    precision="pure_bf16",
                    steps=8,
                )
            )
    return asked


def main() -> None:
    """Time, predict, print."""
    given = argparse.ArgumentParser()
    given.add_argument("models", nargs="*", default=MODELS)
    given.add_argument("--batches", default=BATCHES)
    given.add_argument("--json", action="store_true")
    options = given.parse_args()
    rows: list[dict[str, Any]] = []
    for asked in questions(options.models, options.batches):
        row = our_speed(asked, lambda _: None)
        if row["predicted_s"] is None:
            raise SystemExit("no profile of this chip ships: measure it with tutti profile")
        row["error"] = row["predicted_s"] / row["step_s"] - 1.0
        row["memory_error"] = row["predicted_bytes"] / row["peak_bytes"] - 1.0
        rows.append(row)
        if not options.json:
            print(
                f"{asked.title:60} {row['step_s'] * 1e3:8.1f} ms, predicted "
                f"{row['predicted_s'] * 1e3:8.1f} ({row['error']:+.1%}); memory "
                f"{row['memory_error']:+.1%}",
                flush=True,
            )
    errors = [abs(row["error"]) for row in rows]
    memory = [abs(row["memory_error"]) for row in rows]
    summary = {
        "steps": len(rows),
        "mean": statistics.mean(errors),
        "worst": max(errors),
        "memory_mean": statistics.mean(memory),
        "memory_worst": max(memory),
    }
    print(json.dumps({"rows": rows, **summary} if options.json else summary, indent=1))


if __name__ == "__main__":
    main()
