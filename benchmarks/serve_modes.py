"""What an engine's modes cost on a GPU: adapters in graphs, fixed bits, pages of 8 bits.

    python -m benchmarks.serve_modes adapters          # decoding without, with, and uncaptured
    python -m benchmarks.serve_modes invariant         # bits alone and in company, and the price
    python -m benchmarks.serve_modes pages             # int8 and fp8 beside bfloat16

Weights are random. `--layers 4` makes a quick try of each. Ends with 1 where bits or tokens differ
that must not.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tutti.bench.traces import trace
from tutti.serve import Engine, SamplingParameters
from tutti.serve.adapters import Held

if __package__:
    from benchmarks.serve_gpu import make_engine
else:
    from serve_gpu import make_engine

VOCAB = 40000  # tokens up to it
RANK = 16
SALTS = itertools.count()  # nothing of an earlier turn is found in pages


class Factors(NamedTuple):
    """What an adapter adds to a layer."""

    down: Tensor
    up: Tensor


@contextmanager
def opened(given: argparse.Namespace, **options: Any) -> Iterator[Engine]:
    """Yield an engine with its usual graphs; free its memory afterwards."""
    started = time.perf_counter()
    sizes = {"slots": given.slots, "max_length": given.length, "most_tokens": given.most_tokens}
    engine = make_engine(given.model, "bf16", given.layers, **{**sizes, **options})
    engine.worker.warm_steps.usual()
    print(
        f"{options or 'plain'}: ready after {time.perf_counter() - started:.1f} s, "
        f"{engine.worker.settings.pages} pages, {engine.worker._graphs.count} graphs",
        flush=True,
    )
    yield engine
    for part in (engine.worker, engine):  # the caller's name for it lives on
        part.__dict__.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def decoded(
    engine: Engine, batch: int, adapters: tuple[str, ...] = ("",), steps: int = 60
) -> float:
    """Return seconds of a step in which so many sequences decode, adapters in turn."""
    r = np.random.default_rng(0)
    numbers = [
        engine.add(
            r.integers(3, 1000, 330).tolist(),
            SamplingParameters(
                max_tokens=250, ignore_end=True, adapter=adapters[number % len(adapters)]
            ),
        )
        for number in range(batch)
    ]
    for _ in range(40):
        engine.step()
    engine.worker.accelerator.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        engine.step()
    engine.worker.accelerator.synchronize()
    seconds = (time.perf_counter() - started) / steps
    for number in numbers:
        engine.cancel(number)
    while not engine.is_idle or engine._launched:
        engine.step()
    return seconds


def answered(engine: Engine, requests: int, seed: int) -> float:
    """Return output tokens a second of the chat trace, all at once."""
    for turn in (seed + 1, seed):  # other prompts: none is found in pages
        asked = trace("chat", requests, VOCAB, seed=turn)
        wishes = [SamplingParameters(max_tokens=one.new, ignore_end=True) for one in asked]
        engine.worker.accelerator.synchronize()
        started = time.perf_counter()
        done = engine.generate([one.prompt for one in asked], wishes)
        engine.worker.accelerator.synchronize()
        seconds = time.perf_counter() - started
    return sum(len(one.tokens) for one in done) / seconds


def add_random_adapters(engine: Engine, count: int) -> tuple[str, ...]:
    """Put adapters of random numbers into slots, on every layer that takes one."""
    held = engine.worker.adapters
    slots = held._slots
    device = engine.worker.accelerator.device
    generator = torch.Generator(device).manual_seed(0)
    for number in range(count):
        slot = held._free.pop()
        factors = {}
        for name, (layer, _, piece) in slots._places.items():
            width, out = layer.weight.shape[1], piece.stop - piece.start
            down = torch.randn(RANK, width, device=device, generator=generator) * width**-0.5
            factors[name] = Factors(
                down, torch.randn(out, RANK, device=device, generator=generator) * 0.1
            )
        slots.put(slot, factors)
        held._by_name[f"a{number}"] = Held(f"a{number}", f"a{number}#1", slot)
    return tuple(held._by_name)


def adapters(given: argparse.Namespace) -> bool:
    """Print steps with adapters, captured and not, beside those without."""
    with opened(given) as engine:
        plain = {batch: decoded(engine, batch) for batch in given.batches}
        names = add_random_adapters(engine, 8)
        prompts = [[5 + n, 9, 2, 40 + n] * 20 for n in range(12)]
        wishes = [
            SamplingParameters(max_tokens=24, ignore_end=True, adapter=(("", *names)[n % 9]))
            for n in range(12)
        ]
        logits: dict[bool, list[list[Tensor]]] = {}
        tokens: dict[bool, list[tuple[int, ...]]] = {}
        with Watch(engine) as watch:
            for captured in (True, False):
                engine.worker.adapters._slots.__dict__["asks_host"] = not captured
                tokens[captured] = [tuple(one.tokens) for one in engine.generate(prompts, wishes)]
                logits[captured] = watch.taken()
            worker = engine.worker
            capturable, worker._capturable = worker._capturable, False  # without adapters, too
            each = [engine.generate([p], w)[0] for p, w in zip(prompts, wishes, strict=True)]
            alone = watch.taken()
            bare = [tuple(one.tokens) for one in engine.generate(prompts)]
            without = watch.taken()
            worker._capturable = capturable
        for captured in (True, False):
            engine.worker.adapters._slots.__dict__["asks_host"] = not captured
            for kind, own in (("1 adapter", names[:1]), ("8 adapters", names)):
                for batch in given.batches:
                    seconds = decoded(engine, batch, own, 60 if captured else 10)
                    how = "captured" if captured else "kernel by kernel"
                    ratio = seconds / plain[batch]
                    print(
                        f"batch {batch}, {kind}, {how}: {seconds * 1e3:.2f} ms a step, "
                        f"{ratio:.2f} times without",
                        flush=True,
                    )
        apart, steps = furthest(logits[True], logits[False], tokens[True], tokens[False])
        rounding, _ = furthest(logits[False], alone, tokens[False], [tuple(e.tokens) for e in each])
        other, _ = furthest(logits[True], without, tokens[True], bare)
        print(
            f"logits captured and kernel by kernel differ by {apart:.3f} of their deviation "
            f"in {steps} steps before tokens part; alone and beside others by {rounding:.3f}; "
            f"with and without adapters by {other:.3f}"
        )
    return apart < 2 * rounding < other


class Watch:
    """Keeps the logits of every token that is sampled; steps captured from now on copy theirs."""

    def __init__(self, engine: Engine) -> None:
        self._worker, self._held = engine.worker, engine.scheduler.slots.held
        self._original, self._launch = self._worker._logits, self._worker.launch
        rows = self._worker.settings.slots
        device = self._worker.accelerator.device
        self._kept = torch.zeros(rows, self._worker.model.spec.vocab, device=device)
        self._by_request: dict[int, list[Tensor]] = {}

    def __enter__(self) -> Watch:
        self._worker._logits, self._worker.launch = self._logits, self._launched  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self._worker._logits, self._worker.launch = self._original, self._launch  # type: ignore[method-assign]

    def taken(self) -> list[list[Tensor]]:
        """Return the logits of all requests since the last call, in their order."""
        taken = [self._by_request[request] for request in sorted(self._by_request)]
        self._by_request.clear()
        return taken

    def _logits(self, x: Tensor, batch: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
        logits, positions = self._original(x, batch, rows)
        self._kept[: len(logits), : logits.shape[1]].copy_(logits)
        return logits, positions

    def _launched(self, step: Any) -> Any:
        result = self._launch(step)
        for row, slot in enumerate(step.sample_slots):
            own = self._held[int(slot)]
            if own is not None:
                self._by_request.setdefault(own.request.id, []).append(self._kept[row].clone())
        return result


def furthest(
    one: list[list[Tensor]],
    other: list[list[Tensor]],
    tokens: list[tuple[int, ...]],
    others: list[tuple[int, ...]],
) -> tuple[float, int]:
    """Return how far logits are apart, by their deviation, while two runs agree in tokens."""
    apart, steps = 0.0, 0
    for a, b, own, theirs in zip(one, other, tokens, others, strict=True):
        for place, (first, second) in enumerate(zip(a, b, strict=False)):
            if own[:place] != theirs[:place]:
                break
            apart = max(apart, float((first - second).abs().max() / first.std()))
            steps += 1
    return apart, steps


def bits(engine: Engine, prompt: list[int], others: list[list[int]], place: int) -> list[Tensor]:
    """Return the logits of a request's answer, its prompt computed among others'."""
    worker = engine.worker
    capturable, worker._capturable = worker._capturable, False
    wish = SamplingParameters(max_tokens=12, ignore_end=True, salt=f"{next(SALTS)}")
    with Watch(engine) as watch:
        for one in (*others[:place], prompt, *others[place:]):
            engine.add(one, wish)
        while not engine.is_idle or engine._launched:
            engine.step()
    worker._capturable = capturable
    return watch.taken()[place]


def differing(one: list[Tensor], other: list[Tensor]) -> int:
    """Return in how many steps some bit of the logits is another."""
    assert len(one) == len(other) == 12, (len(one), len(other))
    return sum(not torch.equal(a, b) for a, b in zip(one, other, strict=True))


def same_bits(engine: Engine, name: str) -> int:
    """Print how many of 12 steps' logits change with company; tokens of graphs too."""
    r = np.random.default_rng(4)
    prompt = r.integers(3, 40000, 701).tolist()
    alone = bits(engine, prompt, [], 0)
    total = 0
    for count in (1, 7, 63, 150):
        others = [r.integers(3, 40000, int(n)).tolist() for n in r.integers(3, 900, count)]
        changed = differing(alone, bits(engine, prompt, others, count // 2))
        total += changed
        print(f"{name}: beside {count} others, logits of {changed} of 12 steps differ", flush=True)
    wish = SamplingParameters(max_tokens=64, ignore_end=True, salt="alone")
    own = engine.generate([prompt], wish)[0].tokens
    others = [r.integers(3, 40000, int(n)).tolist() for n in r.integers(3, 900, 90)]
    beside = engine.generate([*others, prompt], replace(wish, salt="beside"))[-1].tokens
    print(f"{name}, captured: 64 tokens beside 90 others equal: {own == beside}", flush=True)
    return total + (own != beside)


def invariant(given: argparse.Namespace) -> bool:
    """Print whether bits change with company, and tokens a second, with and without the mode."""
    found: dict[str, tuple[float, dict[int, float]]] = {}
    firsts, wrong = [], 0
    for fixed in (False, True):
        name = "batch-invariant" if fixed else "plain"
        sizes = [(16, given.most_tokens), (64, 512)] if fixed else [(16, given.most_tokens)]
        for page_size, tokens in sizes:
            with opened(given, invariant=fixed, page_size=page_size, most_tokens=tokens) as engine:
                r = np.random.default_rng(8)
                prompt = r.integers(3, 40000, 701).tolist()
                if fixed:
                    firsts.append(bits(engine, prompt, [], 0))
                changed = same_bits(engine, f"{name}, pages of {page_size}, {tokens} tokens a step")
                wrong += changed if fixed else 0
                if not fixed and not changed:
                    print("nothing changes without the mode: this says nothing of it")
                if page_size == 16:
                    steps = {batch: decoded(engine, batch) for batch in given.batches}
                    found[name] = (answered(engine, given.requests, 11), steps)
    across = differing(*firsts)
    print(f"pages of 16 and 64, steps of {given.most_tokens} and 512 tokens: {across} differ")
    plain, own = found["plain"], found["batch-invariant"]
    print(f"trace: {plain[0]:.0f} and {own[0]:.0f} tok/s: {own[0] / plain[0]:.1%}", flush=True)
    for batch in given.batches:
        before, after = plain[1][batch], own[1][batch]
        print(
            f"batch {batch}: {before * 1e3:.2f} and {after * 1e3:.2f} ms a step: "
            f"{before / after:.1%}",
            flush=True,
        )
    return not wrong and not across


def pages(given: argparse.Namespace) -> bool:
    """Print steps and the trace with pages of 8 bits."""
    for kind in (None, "int8", "fp8"):
        with opened(given, page_dtype=kind) as engine:
            steps = {batch: decoded(engine, batch) for batch in given.batches}
            rate = answered(engine, given.requests, 11)
            each = ", ".join(f"{batch}: {1e3 * s:.2f} ms" for batch, s in steps.items())
            print(f"pages {kind or 'bf16'}: steps {each}; trace {rate:.0f} tok/s", flush=True)
    return True


MODES = {"adapters": adapters, "invariant": invariant, "pages": pages}


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--most-tokens", type=int, default=8192)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument(
        "--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 32, 128]
    )
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--layers", type=int)
    parser.add_argument("what", nargs="+", choices=list(MODES))
    given = parser.parse_args()
    good = [MODES[what](given) for what in given.what]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
