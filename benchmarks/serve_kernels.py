"""Which kernels a server's step spends its time in, step size by step size.

python benchmarks/serve_kernels.py qwen3-8b --layers 12 --rows 1 64 128 256 --chunks 2048
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tutti.accelerator import open_accelerator
from tutti.bench.serving_steps import StepSizeAsked, cut, serving_worker
from tutti.hardware.chip import Dtype
from tutti.models.load import load_model

STEPS = 5


def seconds_of(run: Callable[[], object], steps: int = 40) -> float:
    """Return what one call takes among many."""
    for _ in range(5):
        run()
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    begin.record()
    for _ in range(steps):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / steps / 1e3


def kernels_of(run: Callable[[], object]) -> dict[str, list[float]]:
    """Return the microseconds of every kernel of some steps, by name."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(STEPS):
            run()
        torch.cuda.synchronize()
    sums: dict[str, list[float]] = defaultdict(list)
    for event in found.profiler.kineto_results.events():
        if event.device_type() == DeviceType.CUDA:
            sums[re.sub(r"<.*|\(.*", "", event.name())[:80]].append(event.duration_ns() / 1e3)
    return sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 64, 128, 256])
    parser.add_argument("--chunks", type=int, nargs="*", default=[])
    parser.add_argument("--keys", type=int, default=330)
    parser.add_argument("--most", type=int, default=18)
    asked = parser.parse_args()
    accelerator = open_accelerator(None)
    spec = cut(load_model(asked.model), asked.layers)
    worker = serving_worker(spec, accelerator, Dtype.BF16, 256, 4096)
    sizes = [StepSizeAsked(rows=n, keys=asked.keys) for n in asked.rows]
    sizes += [StepSizeAsked(chunk=n, keys=n) for n in asked.chunks]
    for size in sizes:
        run = worker.warm_steps.rehearse(size.shape, size.keys)
        print(f"\n{size}: {1e3 * seconds_of(run):.3f} ms a step", flush=True)
        found = kernels_of(run)
        total = sum(map(sum, found.values())) / STEPS
        count = sum(map(len, found.values())) / STEPS
        print(f"{total:9.1f} us in {count:.0f} kernels")
        for name, values in sorted(found.items(), key=lambda item: -sum(item[1]))[: asked.most]:
            each = sum(values) / len(values)
            print(f"{sum(values) / STEPS:9.1f} us {len(values) / STEPS:5.0f} × {each:7.1f}  {name}")


if __name__ == "__main__":
    main()
