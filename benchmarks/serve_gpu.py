"""Time the inference engine on a GPU: steps by batch, prefill, and the chat trace.

python benchmarks/serve_gpu.py --model qwen3-8b decode prefill trace
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import torch

from tutti.accelerator import open_accelerator
from tutti.bench.serving import trace
from tutti.models.load import load_model
from tutti.nn import Model
from tutti.nn.initialize import initialize
from tutti.serve import Engine, SamplingParameters
from tutti.serve.loading import Sizes, prepare, settings_for
from tutti.serve.worker import Worker


def make_engine(name: str, **sizes: object) -> Engine:
    """Return an engine of a catalog model with random weights."""
    spec = load_model(name)
    accelerator = open_accelerator()
    model = Model(spec, accelerator.operators, dtype=torch.bfloat16, device=accelerator.device)
    initialize(model, on_device=True)
    model.eval().requires_grad_(False)
    prepare(model)
    settings = settings_for(spec, Sizes(**sizes), accelerator, torch.bfloat16, model)  # type: ignore[arg-type]
    return Engine(Worker(model, accelerator, settings, dtype=torch.bfloat16))


def wishes(new: int) -> SamplingParameters:
    """Return greedy sampling of so many tokens."""
    return SamplingParameters(max_tokens=new, ignore_end=True)


def decode(engine: Engine, batches: list[int], context: int = 330) -> None:
    """Print seconds per step in which so many sequences decode."""
    r = np.random.default_rng(0)
    for batch in batches:
        prompts = [r.integers(3, 1000, context).tolist() for _ in range(batch)]
        numbers = [engine.add(prompt, wishes(200)) for prompt in prompts]
        for _ in range(30):
            engine.step()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(60):
            engine.step()
        torch.cuda.synchronize()
        each = (time.perf_counter() - started) / 60
        print(
            f"decode batch {batch}: {each * 1e3:.3f} ms a step, {batch / each:.0f} tok/s",
            flush=True,
        )
        for number in numbers:
            engine.cancel(number)
        while not engine.is_idle or engine._launched:
            engine.step()


def prefill(engine: Engine, lengths: list[int]) -> None:
    """Print prompt tokens per second."""
    r = np.random.default_rng(1)
    for length in lengths:
        count = max(1, 16384 // length)
        for _ in range(2):
            prompts = [r.integers(3, 100000, length).tolist() for _ in range(count)]
            torch.cuda.synchronize()
            started = time.perf_counter()
            engine.generate(prompts, wishes(1))
            torch.cuda.synchronize()
            seconds = time.perf_counter() - started
        print(f"prefill {count} x {length}: {count * length / seconds:.0f} tok/s", flush=True)


def chat(engine: Engine, requests: int) -> None:
    """Print output tokens per second of the chat trace, all at once."""
    asked = trace("chat", requests, 151936)
    for turn in range(2):
        for one in asked:
            engine.add(one.prompt, wishes(one.new))
        torch.cuda.synchronize()
        started, count, host, first = time.perf_counter(), 0, [], {}
        while not engine.is_idle:
            begun = time.perf_counter()
            for piece in engine.step():
                count += len(piece.tokens)
                first.setdefault(piece.request, time.perf_counter() - started)
            host.append(time.perf_counter() - begun)
        seconds = time.perf_counter() - started
        p99 = float(np.percentile(list(first.values()), 99))
        print(
            json.dumps(
                {
                    "requests": requests,
                    "turn": turn,
                    "tok/s": round(count / seconds),
                    "seconds": round(seconds, 2),
                    "first p99": round(p99, 3),
                    "steps": len(host),
                    "graphs": engine.worker._graphs.count,
                    "median step ms": round(1e3 * float(np.median(host)), 2),
                    "longest ms": round(1e3 * max(host), 1),
                }
            ),
            flush=True,
        )


def profile(engine: Engine, batch: int) -> None:
    """Print the kernels of a decode step."""
    r = np.random.default_rng(0)
    numbers = [engine.add(r.integers(3, 1000, 330).tolist(), wishes(200)) for _ in range(batch)]
    for _ in range(20):
        engine.step()
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        for _ in range(5):
            engine.step()
        torch.cuda.synchronize()
    rows = found.key_averages()
    rows = sorted(rows, key=lambda row: -row.self_device_time_total)[:25]
    for row in rows:
        print(f"{row.self_device_time_total / 5000:8.3f} ms {row.count / 5:6.0f} {row.key[:100]}")
    for number in numbers:
        engine.cancel(number)
    while not engine.is_idle or engine._launched:
        engine.step()


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--most-tokens", type=int, default=8192)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--batches", default="1,64,128,256")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("what", nargs="+")
    given = parser.parse_args()
    started = time.perf_counter()
    engine = make_engine(
        given.model, slots=given.slots, max_length=given.length, most_tokens=given.most_tokens
    )
    print(
        f"ready after {time.perf_counter() - started:.1f} s; {engine.worker.settings}", flush=True
    )
    for what in given.what:
        if what == "decode":
            decode(engine, [int(batch) for batch in given.batches.split(",")])
        elif what == "prefill":
            prefill(engine, [512, 2048, 8192])
        elif what == "trace":
            chat(engine, given.requests)
        elif what == "profile":
            profile(engine, int(given.batches.split(",")[-1]))


if __name__ == "__main__":
    main()
