"""Forward and backward of one block as a CUDA graph, beside the same calls issued one by one.

    python benchmarks/block_graph.py            # on a machine with a GPU

Prints milliseconds per step for shapes from launch-bound to compute-bound; what
`Accelerator.capture` is worth for training blocks, and at which size it stops being worth it.
"""

from __future__ import annotations

import json
import sys
import time

from tutti.accelerator import open_accelerator
from tutti.bench.block_runs import model_shapes, our_run
from tutti.hardware.chip import Dtype


def timed(function, repeats: int, accelerator) -> float:
    for _ in range(5):
        function()
    accelerator.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        function()
    accelerator.synchronize()
    return (time.perf_counter() - begin) / repeats


def main() -> None:
    accelerator = open_accelerator()
    rows = []
    for model, sequences, length in (
        ("llama-3.2-1b", 1, 256),
        ("llama-3.2-1b", 1, 1024),
        ("llama-3.2-1b", 1, 4096),
        ("llama-3.2-1b", 4, 4096),
        ("llama-3-8b", 1, 512),
        ("llama-3-8b", 2, 4096),
    ):
        (shape,) = model_shapes([model], sequences, length)
        run = our_run(shape, accelerator, Dtype.BF16)
        row = {"model": model, "tokens": sequences * length}
        row["issued_ms"] = timed(run.step, 30, accelerator) * 1e3
        try:
            captured = accelerator.capture(run.step)
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            captured = None
        if captured is not None:
            row["captured_ms"] = timed(captured, 30, accelerator) * 1e3
            row["gain"] = row["issued_ms"] / row["captured_ms"]
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    json.dump(rows, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
