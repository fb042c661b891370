"""Time the inference engine on a GPU: steps by batch, prefill, and the chat trace.

python benchmarks/serve_gpu.py --model qwen3-8b decode prefill trace
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace

import numpy as np
import torch

from tutti.accelerator import open_accelerator
from tutti.accelerator.quantised import quantise
from tutti.batching import Scheduler
from tutti.bench.serving_steps import cut
from tutti.bench.traces import trace
from tutti.models.load import load_model
from tutti.nn import Model
from tutti.nn.initialize import initialize
from tutti.nn.linear import Linear
from tutti.nn.quantised import narrow_inputs
from tutti.serve import Engine, SamplingParameters
from tutti.serve.loading import Sizes, invariant_operators, prepare, settings_for
from tutti.serve.worker import Worker


def make_engine(
    name: str, weights: str, layers: int | None, *, invariant: bool = False, **sizes: object
) -> Engine:
    """Return an engine of a catalog model with random weights: bf16, fp8, int4, or both8."""
    spec = cut(load_model(name), layers)
    accelerator = open_accelerator()
    operators = invariant_operators(spec, accelerator) if invariant else accelerator.operators
    model = Model(spec, operators, dtype=torch.bfloat16, device=accelerator.device)
    torch.manual_seed(0)  # two engines of one run have the same weights
    initialize(model, on_device=True)
    model.eval().requires_grad_(False)
    if weights != "bf16":
        for module in model.modules():
            if isinstance(module, Linear) and module.weight.shape[0] >= 16:
                made = quantise(module.weight, "fp8" if weights == "both8" else weights)
                del module.weight
                module.weight = made
        torch.cuda.empty_cache()
    if weights == "both8":
        narrow_inputs(model)
    if not invariant:
        prepare(model)
    asked = Sizes(**sizes)  # type: ignore[arg-type]
    settings = settings_for(spec, asked, accelerator, torch.bfloat16, model)
    worker = Worker(model, accelerator, settings, dtype=torch.bfloat16, codes=asked.codes)
    return Engine(worker)


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
        alone = graph_seconds(engine, batch)
        print(
            f"decode batch {batch}: {each * 1e3:.3f} ms a step, {batch / each:.0f} tok/s; "
            f"its graph alone {alone * 1e3:.3f} ms, idle {1 - alone / each:.1%}",
            flush=True,
        )
        for number in numbers:
            engine.cancel(number)
        while not engine.is_idle or engine._launched:
            engine.step()


def graph_seconds(engine: Engine, batch: int) -> float:
    """Return seconds of a decode step's graph, run again and again: what the chip is busy."""
    fitting = [
        (key.shape.rows, made)
        for key, made in engine.worker._graphs._graphs.items()
        if key.shape.most_queries == 1 and key.shape.rows >= batch
    ]
    if not fitting:
        return float("nan")
    replay = min(fitting, key=lambda pair: pair[0])[1]
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(20):
        replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 20e3


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
    for turn in range(2):  # other prompts each time: none is found in the pages of the last
        asked = trace("chat", requests, 151936, seed=1 - turn)
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


def drained(engine: Engine, prompts: list[list[int]], new: int) -> float:
    """Return the seconds that requests take, all at once."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    engine.generate(prompts, wishes(new))
    torch.cuda.synchronize()
    return time.perf_counter() - started


def prefix(engine: Engine) -> None:
    """Print requests a second of prompts that share nine tenths, and of prompts that do not."""
    r = np.random.default_rng(5)
    for shared in (False, True):
        common = r.integers(3, 100000, 1843).tolist()
        prompts = []
        for _ in range(1024):
            own = r.integers(3, 100000, 2048 - (1843 if shared else 0)).tolist()
            prompts.append(common + own if shared else own)
        seconds = drained(engine, prompts, 64)
        print(
            f"prefix {'shared' if shared else 'alone'}: {1024 / seconds:.1f} requests/s", flush=True
        )


def poisson(engine: Engine, rate: float, requests: int) -> None:
    """Print latencies of the chat trace arriving at random, so many a second."""
    aim(engine, 0.012)
    asked = trace("chat", requests, 151936)
    r = np.random.default_rng(3)
    arrivals = np.cumsum(r.exponential(1 / rate, requests))
    begun, first, last, gaps, count, at = {}, {}, {}, [], 0, 0
    done = {}
    started = time.perf_counter()
    while len(done) < requests:
        now = time.perf_counter() - started
        while at < requests and arrivals[at] <= now:
            number = engine.add(asked[at].prompt, wishes(asked[at].new))
            begun[number], at = arrivals[at], at + 1
        if engine.is_idle:
            time.sleep(max(0.0, arrivals[at] - (time.perf_counter() - started)))
            continue
        for piece in engine.step():
            now = time.perf_counter() - started
            count += len(piece.tokens)
            if piece.request in last:
                gaps.append(now - last[piece.request])
            first.setdefault(piece.request, now)
            last[piece.request] = now
            if piece.finish is not None:
                done[piece.request] = now
    latency = [done[n] - begun[n] for n in done]
    each = [(done[n] - first[n]) for n in done]
    print(
        json.dumps(
            {
                "rate": rate,
                "tok/s": round(count / (time.perf_counter() - started)),
                "latency median": round(float(np.median(latency)), 3),
                "first median": round(float(np.median([first[n] - begun[n] for n in done])), 3),
                "first p99": round(
                    float(np.percentile([first[n] - begun[n] for n in done], 99)), 3
                ),
                "ms a token": round(1e3 * sum(each) / max(1, count - requests), 2),
                "gap p99 ms": round(1e3 * float(np.percentile(gaps, 99)), 2),
            }
        ),
        flush=True,
    )


def aim(engine: Engine, target_s: float) -> None:
    """Let prompts be cut such that steps keep a time."""
    prices = engine.worker.warm_steps.prices(engine.worker.settings, engine.worker.accelerator)
    print(prices, flush=True)
    settings = replace(engine.worker.settings, target_s=target_s)
    engine.scheduler = Scheduler(settings, prices=prices)


def interrupted(engine: Engine) -> None:
    """Print the gaps of 32 that decode, alone and while a prompt of 32,000 tokens comes in."""
    aim(engine, 0.0105)
    r = np.random.default_rng(7)
    for _ in range(32):
        engine.add(r.integers(3, 1000, 300).tolist(), wishes(1500))

    def gaps(steps: int) -> list[float]:
        last, found = {}, []
        for _ in range(steps):
            for piece in engine.step():
                now = time.perf_counter()
                if piece.request in last:
                    found.append(now - last[piece.request])
                last[piece.request] = now
        return found

    gaps(50)
    alone = gaps(200)
    engine.add(r.integers(3, 1000, 32000).tolist(), wishes(1))
    beside = gaps(220)
    print(
        f"32 decode: gap p99 {1e3 * np.percentile(alone, 99):.2f} ms, beside a prompt of 32,000: "
        f"p99 {1e3 * np.percentile(beside, 99):.2f}, most {1e3 * max(beside):.2f} ms",
        flush=True,
    )
    while not engine.is_idle:
        engine.step()


def peer(name: str, requests: int) -> None:
    """Print the same trace through transformers' continuous batching, with random weights."""
    import transformers

    from tutti.bench.serving import _transformers_once, transformers_settings

    transformers.utils.logging.set_verbosity_error()
    assert name == "qwen3-8b"
    config = transformers.Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    model.eval()
    asked = trace("chat", requests, 151936)
    settings = transformers_settings(asked)
    generation = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    with torch.no_grad():
        _transformers_once(model, generation, settings, asked[:4])
        seconds, _, count = _transformers_once(model, generation, settings, asked)
    print(f"transformers: {count / seconds:.0f} tok/s, {seconds:.2f} s", flush=True)


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
    parser.add_argument("--weights", default="bf16")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--page-dtype")
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument("what", nargs="+")
    given = parser.parse_args()
    started = time.perf_counter()
    if given.what == ["peer"]:
        peer(given.model, given.requests)
        return
    engine = make_engine(
        given.model,
        given.weights,
        given.layers,
        slots=given.slots,
        max_length=given.length,
        most_tokens=given.most_tokens,
        page_dtype=given.page_dtype,
    )
    print(
        f"ready after {time.perf_counter() - started:.1f} s; {engine.worker.settings}", flush=True
    )
    engine.warm_up()
    print(
        f"{engine.worker._graphs.count} graphs after {time.perf_counter() - started:.1f} s",
        flush=True,
    )
    for what in given.what:
        if what == "decode":
            decode(engine, [int(batch) for batch in given.batches.split(",")])
        elif what == "prefill":
            prefill(engine, [length for length in (512, 2048, 8192) if length < given.length])
        elif what == "trace":
            chat(engine, given.requests)
        elif what == "prefix":
            prefix(engine)
        elif what == "poisson":
            poisson(engine, given.rate, given.requests)
        elif what == "interrupted":
            interrupted(engine)
        elif what == "profile":
            profile(engine, int(given.batches.split(",")[-1]))


if __name__ == "__main__":
    main()
