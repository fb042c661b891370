"""Serve more than pages hold, with and without pages on the host, beside what prices predict.

python benchmarks/host_pages.py --model smollm2-135m --layers 30 --prompt 192 --new 96

Weights are random. The same requests are served with and without, twice: those that give way
are computed again, or kept on the host where that is priced cheaper. Each engine's steps are priced
by what was measured at its start; the sum of those is the prediction.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from typing import NamedTuple

import numpy as np
import torch

from tutti.accelerator import open_accelerator
from tutti.batching import Step, StepSize
from tutti.batching.prices import Prices, TabledPrices
from tutti.bench.serving_steps import cut
from tutti.cost.serving.step_load import load_of
from tutti.models.load import load_model
from tutti.nn import Model
from tutti.nn.initialize import initialize
from tutti.serve import Completion, Engine, SamplingParameters
from tutti.serve.loading import DTYPES, Sizes, prepare, settings_for
from tutti.serve.worker import Launched, Worker

URGENT_STEPS, URGENT_TOKENS = 8, 4  # between two urgent requests; of each


class PricedWorker(Worker):
    """A worker that adds up what its steps were to take."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.sizes: list[StepSize] = []
        self.known: TabledPrices | None = None

    def prices(self, *, guesses: bool = False) -> Prices | None:
        """Return what was measured once for all engines."""
        del guesses
        return self.known

    def measured(self) -> TabledPrices:
        """Time steps and moves."""
        stow_s, fetch_s = self.host_pages.seconds()
        timed = self.warm_steps.prices(self.settings, self.accelerator)
        return dataclasses.replace(timed, stow_s=stow_s, fetch_s=fetch_s)

    def launch(self, step: Step) -> Launched:
        """Give a step to the device, and note its size."""
        load = load_of(step, (None,))
        size = StepSize(
            load.rows, load.num_chunks_tokens, int(load.keys[0]), int(load.pairs[0]),
            int((step.starts[load.rows :] > 0).sum()), load.stows, load.fetches,
        )  # fmt: skip
        self.sizes.append(size)
        return super().launch(step)


class Served(NamedTuple):
    """What came of an engine."""

    tokens: list[tuple[int, ...]]
    prices: TabledPrices


def served(
    model: Model, asked: argparse.Namespace, host_pages: int, prices: TabledPrices | None
) -> Served:
    """Return what one engine said, its tokens per second and its counters."""
    accelerator, dtype = open_accelerator(asked.device), DTYPES[asked.dtype]
    longest = asked.prompt + asked.new
    held = -(-longest // 16)
    sizes = Sizes(
        slots=asked.requests, pages=int(asked.share * asked.requests * held) + 1, prefix=False,
        max_length=longest, most_tokens=asked.chunk, host_pages=host_pages,
    )  # fmt: skip
    settings = settings_for(model.spec, sizes, accelerator, dtype, model)
    worker = PricedWorker(model, accelerator, settings, dtype=dtype)
    worker.known = prices = prices or worker.measured()
    engine = Engine(worker)
    drawn = np.random.default_rng(0)
    prompts = [
        drawn.integers(3, model.spec.vocab, asked.prompt).tolist() for _ in range(asked.requests)
    ]
    wishes = SamplingParameters(max_tokens=asked.new, ignore_end=True)
    engine.generate([prompts[0][:40]], dataclasses.replace(wishes, max_tokens=4))
    engine.counters, worker.sizes = type(engine.counters)(), []
    urgent = [
        drawn.integers(3, model.spec.vocab, asked.prompt).tolist() for _ in range(asked.urgent)
    ]
    accelerator.synchronize()
    started, busy = time.perf_counter(), time.process_time()
    completions = generated(engine, prompts, urgent, wishes)
    seconds, busy = time.perf_counter() - started, time.process_time() - busy
    predicted = sum(prices.seconds(size) for size in worker.sizes)
    count = engine.counters
    figures = {
        "host pages": host_pages, "pages": settings.pages - 1,
        "tokens/s": sum(len(done.tokens) for done in completions) / seconds, "seconds": seconds,
        "processor s": busy,
        "predicted s": predicted, "steps": count.steps, "preempted": count.preemptions,
        "computed": count.computed_tokens, "out": count.stowed_pages, "back": count.fetched_pages,
        "ms out": 1e3 * prices.stow_s, "ms back": 1e3 * prices.fetch_s,
    }  # fmt: skip
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}), flush=True)
    return Served([done.tokens for done in completions], prices)


def generated(
    engine: Engine, prompts: list[list[int]], urgent: list[list[int]], wishes: SamplingParameters
) -> list[Completion]:
    """Return all answers; urgent requests come one by one and take the slots of others."""
    numbers = [engine.add(prompt, wishes) for prompt in prompts]
    soon = dataclasses.replace(wishes, priority=1, max_tokens=URGENT_TOKENS)
    steps = 0
    while not engine.is_idle:
        engine.step()
        steps += 1
        if urgent and steps % URGENT_STEPS == 0:
            numbers.append(engine.add(urgent.pop(), soon))
    completions = (engine.take(number) for number in numbers)
    return [done for done in completions if done is not None]


def main() -> None:
    """Print both, and whether they said the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=192)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--urgent", type=int, default=0, help="requests that go before others")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--share", type=float, default=0.75, help="of the pages that all need")
    asked = parser.parse_args()
    spec = cut(load_model(asked.model), asked.layers)
    accelerator = open_accelerator(asked.device)
    model = Model(
        spec, accelerator.operators.as_serving(), dtype=DTYPES[asked.dtype],
        device=accelerator.device,
    )  # fmt: skip
    initialize(model, on_device=True)
    prepare(model.eval().requires_grad_(False))
    torch.set_grad_enabled(False)
    whole = asked.requests * -(-(asked.prompt + asked.new) // 16)
    kept, prices = served(model, asked, whole, None)
    anew, _ = served(model, asked, 0, prices)
    for host in (whole, 0):
        served(model, asked, host, prices)
    alike = sum(a == b for a, b in zip(kept, anew, strict=True))
    print(f"{alike} of {len(kept)} requests say the same both ways")


if __name__ == "__main__":
    main()
