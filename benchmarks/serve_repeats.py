"""n-gram guesses on text that repeats itself: seconds of the processor per token, with and without.

    python benchmarks/serve_repeats.py FOLDER [--dtype fp32] [--guesses 8] [--new 96] [--rounds 3]

FOLDER holds a model and its tokenizer. Prompts are passages that stand there three times and begin
a fourth; the model goes on, greedily, one answer at a time. Both ways in turns on one thread. In
fp32 the answers of both must be the same tokens; in bf16 products of other shapes round otherwise.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from tutti.serve import Engine, SamplingParameters

PASSAGES = (
    "The quick brown fox jumps over the lazy dog near the river, where the old mill stands. ",
    '{"name": "lamp", "on": true, "room": "kitchen", "watts": 12},\n',
    "def add(a, b):\n    return a + b\n\n\n",
    "One ring of the bell means dinner; two mean that the train leaves in five minutes. ",
    "Step 1: open the box. Step 2: take the key. Step 3: close the box again. ",
    "| chip | bandwidth | price |\n|---|---|---|\n| A100 | 2039 | 3.7 |\n",
)


def answer(engine: Engine, prompt: str, new: int) -> tuple[tuple[int, ...], float]:
    """Return a greedy answer, and the seconds of the processor that each of its tokens took."""
    wishes = SamplingParameters(max_tokens=new, temperature=0.0, ignore_end=True)
    began = time.process_time()
    (done,) = engine.generate([prompt], wishes)
    taken = time.process_time() - began
    tokens = tuple(done.answers[0].tokens)
    return tokens, taken / len(tokens)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--guesses", type=int, default=8)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    engines = {
        count: Engine.from_pretrained(
            given.folder, dtype=given.dtype, device="cpu", guesses=count, max_length=512, slots=4
        )
        for count in (0, given.guesses)
    }
    for engine in engines.values():
        answer(engine, PASSAGES[0] * 4, 16)  # what is compiled or loaded at first use
    gains = []
    for passage in PASSAGES:
        prompt = passage * 3 + passage[: len(passage) // 3]
        times: dict[int, list[float]] = {count: [] for count in engines}
        said = {}
        for _ in range(given.rounds):
            for count, engine in engines.items():
                said[count], seconds = answer(engine, prompt, given.new)
                times[count].append(seconds)
        plain, guessed = (statistics.median(times[count]) for count in engines)
        same = len(set(said.values())) == 1
        gains.append(plain / guessed)
        print(
            f"{passage[:24]!r:28} {plain * 1e3:.1f} ms a token, with guesses {guessed * 1e3:.1f}: "
            f"{plain / guessed:.2f} times; tokens {'equal' if same else 'DIFFER'}",
            flush=True,
        )
    print(f"median {statistics.median(gains):.2f} times, {min(gains):.2f} to {max(gains):.2f}")


if __name__ == "__main__":
    main()
