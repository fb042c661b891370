"""Which kernels a training step of one chip spends its time in, and where it stands still.

python benchmarks/step_kernels.py llama-3-8b 2
python benchmarks/step_kernels.py mixtral-8x7b 2 --layers 4 --precision pure_fp8
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from tutti.accelerator import open_accelerator
from tutti.bench.training.question import SETTINGS, SpeedQuestion, tokens_of
from tutti.nn.batch import Batch
from tutti.nn.initialize import initialize
from tutti.ranks.single_rank import NoLinks
from tutti.train.engine.engine import Engine

STEPS = 2


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    begin: float  # ms
    end: float


def measured(asked: SpeedQuestion) -> list[Kernel]:
    """Return what ran on the chip in some steps, in order; only the chip is watched."""
    accelerator, spec = open_accelerator(None), asked.spec()
    length, micro_batch = asked.sequence_length, asked.micro_batch
    plan = asked.plan(spec)
    engine = Engine(plan, spec, 0, accelerator, NoLinks(), clip_norm=None)
    initialize(engine.model, on_device=True)
    engine.take_masters()
    tokens, targets = tokens_of(asked, spec, accelerator, 0)
    batch = Batch.of(spec, tokens.flatten(), [length] * micro_batch, targets_t=targets.flatten())
    for _ in range(3):
        engine.step(lambda _: batch, SETTINGS)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(STEPS):
            engine.step(lambda _: batch, SETTINGS)
        torch.cuda.synchronize()
    events = found.profiler.kineto_results.events()
    on_chip = [e for e in events if e.device_type() == torch.autograd.DeviceType.CUDA]
    kernels = [
        Kernel(e.name(), e.start_ns() / 1e6, (e.start_ns() + e.duration_ns()) / 1e6)
        for e in on_chip
        if "Command Buffer" not in e.name() and not e.name().startswith("cudaEvent")
    ]
    return sorted(kernels, key=lambda k: k.begin)


def table(title: str, rows: Iterable[tuple[str, float]], limit: int) -> None:
    """Print the largest sums of rows by name, per step."""
    sums: dict[str, list[float]] = defaultdict(list)
    for name, ms in rows:
        sums[name].append(ms)
    print(f"\n{title}: {sum(map(sum, sums.values())) / STEPS:.2f} ms per step")
    for name, values in sorted(sums.items(), key=lambda item: -sum(item[1]))[:limit]:
        total, count = sum(values) / STEPS, len(values) / STEPS
        each = f"{1e3 * total / count:8.1f} us, at most {1e3 * max(values):8.1f}"
        print(f"{total:8.2f} ms {count:6.0f} × {each}  {name}")


def gaps(kernels: Sequence[Kernel]) -> list[tuple[str, float]]:
    """Return the pauses of the chip, each with what ended before and began after it."""
    found, reached, last = [], kernels[0].end, kernels[0].name
    for kernel in kernels[1:]:
        if kernel.begin > reached:
            found.append((f"{last[:55]:55} | {kernel.name[:55]}", kernel.begin - reached))
        if kernel.end > reached:
            reached, last = kernel.end, kernel.name
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("micro_batch", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--precision", default="pure_bf16")
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--lora", type=int)
    asked = parser.parse_args()
    question = SpeedQuestion(
        model=asked.model, device=None, micro_batch=asked.micro_batch, layers=asked.layers,
        sequence_length=asked.sequence_length, precision=asked.precision, steps=1,
        lora=asked.lora,
    )  # fmt: skip
    kernels = measured(question)
    print(f"{(kernels[-1].end - kernels[0].begin) / STEPS:.1f} ms per step")
    table("kernels", ((k.name[:110], k.end - k.begin) for k in kernels), asked.rows)
    table("pauses", gaps(kernels), asked.rows)


if __name__ == "__main__":
    main()
