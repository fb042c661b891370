"""Time decoding on a GPU with and without guesses that are right four times in five.

python -m benchmarks.serve_guesses --model qwen3-8b --batches 1,16
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.serve_gpu import make_engine, wishes
from tutti.batching import Scheduler
from tutti.serve import Engine
from tutti.serve.drafting import Pace, Wanted
from tutti.serve.outputs import Counters
from tutti.serve.speculation import Speculation, Switch


class Oracle:
    """Guesses the token after each, right four times in five."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(9)

    def guess(self, wanted: Sequence[Wanted]) -> dict[int, tuple[int, ...]]:
        """Return guesses by sequence."""
        found = {}
        for one in wanted:
            right = self.random.random(one.count) < 0.8
            coming = int(one.tokens[-1]) + 1 + np.arange(one.count)
            found[one.sequence] = tuple(np.where(right, coming, 3).tolist())
        return found


def count_on(engine: Engine) -> None:
    """Let the model say the token after the last one: all its products stay what they are.

    Random weights answer by what the last bit is, so that no oracle knows how they go on.
    """
    vocab = engine.worker.model.spec.vocab
    table, head = (p for p in engine.worker.model.parameters() if p.shape[0] == vocab)
    table.mul_(100)
    head.copy_(table.roll(1, 0))


def oracle(engine: Engine, batches: list[int], guesses: int = 8, new: int = 256) -> None:
    """Print tokens a second with and without guesses that are right four times in five."""
    count_on(engine)
    settings = engine.worker.settings
    r = np.random.default_rng(11)
    prices = engine.worker.warm_steps.prices(settings, engine.worker.accelerator)
    for batch in batches:
        prompts = [r.integers(3, 100000, 200).tolist() for _ in range(batch)]
        expected = [[prompt[-1] + 1 + n for n in range(new)] for prompt in prompts]
        switch = Switch()
        for drafter in (None, Oracle(), None, Oracle()):
            engine.scheduler = Scheduler(settings, prices)
            engine.counters = Counters()
            engine.speculation = drafter and Speculation(
                drafter, Pace(guesses, prices), engine.counters, switch=switch
            )
            torch.cuda.synchronize()
            started = time.perf_counter()
            done = engine.generate(prompts, wishes(new))
            seconds = time.perf_counter() - started
            count = engine.counters
            same = [list(d.answers[0].tokens) for d in done] == expected
            print(
                f"batch {batch}, {'guesses' if drafter else 'plain'}: {batch * new / seconds:.0f} "
                f"tok/s, {count.steps} steps, {count.foreseen_tokens} of {count.guessed_tokens} "
                f"guessed tokens right; answers {'as expected' if same else 'WRONG'}",
                flush=True,
            )
    engine.speculation = None


def main() -> None:
    """Make an engine and time it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--batches", default="1,64")
    given = parser.parse_args()
    engine = make_engine(
        given.model, "bf16", None, slots=given.slots, max_length=4096, most_tokens=8192
    )
    engine.warm_up()
    oracle(engine, [int(batch) for batch in given.batches.split(",")])


if __name__ == "__main__":
    main()
