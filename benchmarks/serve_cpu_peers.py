"""One thread of a CPU: our engine, transformers' continuous batching and its static batches.

    python benchmarks/serve_cpu_peers.py FOLDER [--minutes 6] [--rounds 2] [--requests 32]
        [--dtypes fp32,bf16] [--engines tutti,continuous]

All get the same prompts (16 to 256 tokens) at once and the same numbers of new tokens (16 to 128),
and ignore the model's own end. First every engine serves a few of them in each dtype, then each in
the dtype in which it was fastest serves all, in turns. Tokens of static batches are those that were
asked for: what a batch computes beyond them, until its longest answer ends, counts for nothing.
Every turn is a process of its own, and the next one begins when it has ended. FOLDER holds a model
in Hugging Face's form; a tokenizer is not needed. Rows are lines of JSON; the last sums up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ENGINES = ("tutti", "continuous", "static")
DTYPES = ("fp32", "bf16", "fp16")
FEW = 6  # requests by which dtypes are compared
TRIED = 0.25  # of the time that is left: more is not given to one try in one dtype
STATIC_BATCH = 8


def serve(given: argparse.Namespace) -> None:
    """Serve so many requests with one engine in one dtype, and print a row."""
    import torch

    from tutti.bench.serving import run_transformers, run_tutti
    from tutti.bench.traces import trace
    from tutti.huggingface.dtypes import weight_dtype
    from tutti.models.load import load_model

    torch.set_num_threads(1)
    every = trace("short", given.requests, load_model(str(given.folder)).vocab)
    asked = every[: given.first or len(every)]
    if given.first:
        asked = [replace(one, new=min(one.new, 24)) for one in asked]
    if given.engine == "tutti":
        longest = max(len(one.prompt) + one.new for one in asked)
        done = run_tutti(
            given.folder, asked, device="cpu", dtype=given.dtype, slots=64, max_length=longest
        )
        row = {"seconds": done.seconds, "cpu_s": done.cpu_s, "tokens": done.output_tokens}
    elif given.engine == "continuous":
        name = weight_dtype(given.dtype).name
        done = run_transformers(given.folder, asked, device="cpu", dtype=name)
        row = {"seconds": done.seconds, "cpu_s": done.cpu_s, "tokens": done.output_tokens}
    else:
        row = in_static_batches(given.folder, asked, weight_dtype(given.dtype).name)
    wanted = sum(one.new for one in asked)
    assert row["tokens"] == wanted, (row, wanted)
    print(json.dumps(row))


def in_static_batches(folder: Path, asked: Sequence[Any], dtype: str) -> dict[str, float]:
    """Serve with `transformers.generate`: batches of answers of like lengths, prompts padded."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    ).eval()
    ordered = sorted(asked, key=lambda one: one.new)
    batches = [ordered[i : i + STATIC_BATCH] for i in range(0, len(ordered), STATIC_BATCH)]

    def answer(batch: Sequence[Any], new: int) -> int:
        longest = max(len(one.prompt) for one in batch)
        tokens = torch.zeros(len(batch), longest, dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for row, one in enumerate(batch):
            tokens[row, longest - len(one.prompt) :] = torch.tensor(one.prompt)
            mask[row, longest - len(one.prompt) :] = 1
        made = model.generate(
            input_ids=tokens, attention_mask=mask, do_sample=False, max_new_tokens=new,
            min_new_tokens=new, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert made.shape[1] == longest + new, made.shape
        return sum(min(new, one.new) for one in batch)

    with torch.no_grad():
        answer(batches[0][:2], 4)
        began, spent = time.perf_counter(), time.process_time()
        tokens = sum(answer(batch, batch[-1].new) for batch in batches)
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - spent
    return {"seconds": seconds, "cpu_s": cpu_s, "tokens": tokens}


class Turns:
    """Runs engines one after the other until the time is over."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given, self._began = given, time.monotonic()

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return 60.0 * self._given.minutes - (time.monotonic() - self._began)

    def take(self, engine: str, dtype: str, first: int, most_s: float) -> dict[str, Any] | None:
        """Let an engine serve in a process of its own; None if it failed or did not end."""
        given = self._given
        command = [sys.executable, __file__, str(given.folder), "--engine", engine]
        command += ["--dtype", dtype, "--requests", str(given.requests), "--first", str(first)]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
        hidden = {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
        told: dict[str, Any] = {"engine": engine, "dtype": dtype, "first": first or given.requests}
        try:
            ran = subprocess.run(
                command, env={**os.environ, **threads, **hidden}, capture_output=True, text=True,
                timeout=max(1.0, min(most_s, self.left_s)), check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            print(json.dumps(told | {"failed": "did not end in time"}), flush=True)
            return None
        if ran.returncode:
            said = ran.stderr.strip().splitlines()[-1:]
            print(json.dumps(told | {"failed": said[0] if said else "?"}), flush=True)
            return None
        row: dict[str, Any] = told | json.loads(ran.stdout.strip().splitlines()[-1])
        row["tokens_per_s"] = round(row["tokens"] / row["seconds"], 1)
        row["tokens_per_cpu_s"] = round(row["tokens"] / row["cpu_s"], 1)
        print(json.dumps(row), flush=True)
        return row


def compare(given: argparse.Namespace) -> None:
    """Find each engine's fastest dtype, then let all serve in turns."""
    turns, fastest = Turns(given), {}
    for engine in given.engines.split(","):
        best = 0.0
        for dtype in given.dtypes.split(","):
            row = turns.take(engine, dtype, FEW, TRIED * turns.left_s)
            if row is not None and row[given.by] > best:
                best, fastest[engine] = row[given.by], dtype
    rates: dict[str, list[float]] = {engine: [] for engine in fastest}
    for _ in range(given.rounds):
        for engine, dtype in fastest.items():
            row = turns.take(engine, dtype, 0, turns.left_s) if turns.left_s > 5.0 else None
            if row is not None:
                rates[engine].append(row[given.by])
    medians = {engine: statistics.median(each) for engine, each in rates.items() if each}
    ours = medians.get("tutti", 0.0)
    told: dict[str, Any] = {"fastest": fastest, given.by: medians}
    told["tutti over"] = {k: round(ours / v, 2) for k, v in medians.items() if k != "tutti"}
    print(json.dumps(told), flush=True)


def main() -> None:
    """Serve, or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--engines", default=",".join(ENGINES), help="that are compared")
    parser.add_argument("--by", choices=("tokens_per_s", "tokens_per_cpu_s"),
                        default="tokens_per_s")  # fmt: skip
    parser.add_argument("--engine", choices=ENGINES, help="serve with it alone")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--first", type=int, default=0, help="of the requests; 0: all")
    given = parser.parse_args()
    if given.engine:
        serve(given)
    else:
        compare(given)


if __name__ == "__main__":
    main()
