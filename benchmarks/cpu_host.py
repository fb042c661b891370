"""What a host's processors do beside what is said of them: products, serving, training.

    python benchmarks/cpu_host.py OUT [--minutes 5.5] [--tokenizer FOLDER] [--parts rates,…]

The model has SmolLM2-135M's shape and random weights, made on the spot. One thread everywhere. Two
lanes run beside each other on cores of their own (no siblings of one core):

- `peers`: benchmarks/serve_cpu_peers.py in bf16; `steps`: our steps by their number of rows and
  where their time goes; `predicted`: benchmarks/serve_predicted.py;
- `rates`: products and copies while none to all other processors do the same, siblings told apart;
  `profile`, `one`, `two`: a profile, then traced training steps of an adapter on one rank and on
  two, kind by kind beside their prediction (needs `--tokenizer`, a folder with a chat template).

Results are files in OUT, written as they come.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LANES = (("peers", "steps", "predicted"), ("rates", "profile", "one", "two"))
SHAPE: dict[str, Any] = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 2, "rope_theta": 100000.0,
}  # fmt: skip
COUNTS = (1, 2, 4, 8, 16)  # processes that multiply at the same time
ROWS = (1, 2, 4, 8, 12, 16, 24, 32)


def cores() -> list[list[int]]:
    """Return the processors that this process may use, core by core."""
    found: dict[str, list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        found.setdefault(path.read_text() if path.exists() else str(cpu), []).append(cpu)
    return list(found.values())


# --- parts, each a process of its own ------------------------------------------------------


def multiply(seconds: float) -> None:
    """Print what one process reaches in a while: GFLOP/s of products, GB/s of copies."""
    import torch

    torch.set_num_threads(1)
    told: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (16, 512):
            x = torch.randn(rows, 576).to(dtype)
            weights = [torch.randn(3072, 576).to(dtype) for _ in range(12)]
            began, done = time.perf_counter(), 0
            while time.perf_counter() - began < seconds:
                for weight in weights:
                    torch.nn.functional.linear(x, weight)
                done += 1
            flops = 2.0 * rows * 3072 * 576 * len(weights) * done
            told[f"{dtype} x {rows}"] = flops / (time.perf_counter() - began) / 1e9
    source, target = torch.zeros(1 << 26), torch.zeros(1 << 26)
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        target.copy_(source)
        done += 1
    told["copied"] = 2.0 * source.nbytes * done / (time.perf_counter() - began) / 1e9
    print(json.dumps({name: round(value, 1) for name, value in told.items()}))


def rates() -> None:
    """Let more and more processes multiply, on cores of their own and on siblings."""
    own = cores()
    print(json.dumps({"cores": own}), flush=True)
    order = [core[0] for core in own] + [cpu for core in own for cpu in core[1:]]
    cases = [(f"{count} pinned", order[:count]) for count in COUNTS if count <= len(order)]
    if len(own[0]) > 1:
        cases.append(("two siblings", own[0][:2]))
    for name, cpus in cases:
        command = [sys.executable, __file__, "-", "--part", "multiply"]
        ran = [
            subprocess.Popen(
                ["taskset", "-c", str(cpu), *command], stdout=subprocess.PIPE, text=True
            )
            for cpu in cpus
        ]
        rows = [json.loads(one.communicate()[0] or "{}") for one in ran]
        least = {key: min(row[key] for row in rows if row) for key in rows[0]}
        most = {key: max(row[key] for row in rows if row) for key in rows[0]}
        print(json.dumps({"case": name, "least": least, "most": most}), flush=True)


def make_model(folder: Path, tokenizer: Path | None) -> None:
    """Write a model of SmolLM2's shape."""
    import shutil

    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    model.save_pretrained(folder)
    for path in tokenizer.iterdir() if tokenizer else ():
        if path.name.startswith("tokenizer"):
            shutil.copy(path, folder)


def steps(folder: Path, dtype: str) -> None:
    """Print seconds of steps by their rows, and which functions take them."""
    import cProfile
    import pstats

    import torch

    from tutti.bench.traces import trace
    from tutti.serve import Engine, SamplingParameters

    torch.set_num_threads(1)
    asked = trace("short", 32, SHAPE["vocab_size"])
    longest = max(len(one.prompt) + one.new for one in asked)
    engine = Engine.from_pretrained(
        folder, device="cpu", dtype=dtype, slots=64, max_length=longest, prefix=False
    )
    engine.generate([[1, 2, 3]] * 2, SamplingParameters(max_tokens=4, ignore_end=True))
    for looked in (False, True):
        for one in asked:
            wish = SamplingParameters(max_tokens=one.new, ignore_end=True)
            engine.add(list(one.prompt), wish)
        profile = cProfile.Profile(time.process_time)
        taken: dict[int, list[float]] = {}
        if looked:
            profile.enable()
        while not engine.is_idle:
            began, before = time.process_time(), engine.counters.computed_tokens
            engine.step()
            tokens = engine.counters.computed_tokens - before
            taken.setdefault(tokens, []).append(time.process_time() - began)
        profile.disable()
        if looked:
            pstats.Stats(profile).sort_stats("tottime").print_stats(32)
            continue
        every = sorted(taken.items())
        means = {tokens: round(1e3 * sum(each) / len(each), 2) for tokens, each in every}
        told = {"dtype": dtype, "cpu_s": sum(sum(each) for each in taken.values())}
        print(json.dumps(told | {"ms by tokens": means}), flush=True)


def train(folder: Path, work: Path, ranks: int) -> None:
    """Train an adapter for a few steps, the last one traced; print it beside its prediction."""
    os.chdir(work)
    sys.path.insert(0, str(HERE))
    import teach_smollm2 as lesson  # type: ignore[import-not-found]

    import tutti

    lesson.write_data()
    names = ("one", "two")[:ranks]
    cluster: dict[str, Any] = {
        "name": "here",
        "chips": [lesson._chip(name, 1) for name in names],
        "nodes": [lesson._node(name, name) for name in names],
        "pools": [{"name": name, "node": name} for name in names],
    }
    if ranks > 1:
        link = {"bandwidth": "1 GB/s", "latency_s": "50 us", "same_host": True}
        cluster["fabric"] = {"links": [{"pools": list(names), **link}]}
    Path(f"cluster-{ranks}.json").write_text(json.dumps(cluster), encoding="utf-8")
    trainer = tutti.Trainer.from_pretrained(
        str(folder), cluster=f"cluster-{ranks}.json",
        data={"train": ["chats.jsonl"], "holdout": 0.03},
        job={"sequence_length": 256, "global_batch": 2 * ranks, "precision": "bf16",
             "use_all_pools": True, "chip_profiles": ["profile.json"]},
        tuning={"adapter": {"rank": 16, "alpha": 32}},
        optimizer={"learning_rate": 1e-3, "warmup_steps": 2, "weight_decay": 0},
        steps=5, measure={"trace_steps": [4, 5]}, timeout_s=200, output=f"out/{ranks}",
    )  # fmt: skip
    result = trainer.fit(overwrite=True)
    print(f"{ranks}: step {result.seconds_per_step:.3f} s, predicted {result.predicted_s:.3f} s",
          flush=True)  # fmt: skip


# --- lanes ---------------------------------------------------------------------------------


def commands(part: str, folder: Path, work: Path, left_s: float) -> list[list[str]]:
    """Return what a part runs."""
    python, own = sys.executable, [sys.executable, __file__, str(work)]
    within = f"{max(20.0, left_s) / 60.0:.2f}"
    tutti = [python, "-m", "tutti"]
    given = {
        "peers": [[python, str(HERE / "serve_cpu_peers.py"), str(folder), "--minutes", within,
                   "--rounds", "1", "--dtypes", "bf16,fp16", "--engines", "tutti,continuous"]],
        "steps": [[*own, "--part", "steps", "--dtype", dtype] for dtype in ("bf16", "fp32")],
        "predicted": [[python, str(HERE / "serve_predicted.py"), "--model", "smollm2-135m",
                       "--device", "cpu", "--dtype", "bf16", "--minutes",
                       f"{min(1.9, left_s / 60.0):.2f}"]],
        "rates": [[*own, "--part", "rates"]],
        "profile": [[*tutti, "profile", str(folder), "-o", str(work / "profile.json"), "--dtype",
                     "bf16", "--device", "cpu", "--threads", "1", "--tokens", "256,512",
                     "--sequence-length", "256", "--budget", "60s"]],
        "one": [[*own, "--part", "one"],
                [*tutti, "validate", "--run", str(work / "out/1"), "--step", "5"]],
        "two": [[*own, "--part", "two"],
                [*tutti, "validate", "--run", str(work / "out/2"), "--step", "5"]],
    }  # fmt: skip
    return given[part]


def run_lane(
    parts: list[str], cpus: list[int], given: argparse.Namespace, folder: Path, ends: float
) -> None:
    """Run parts one after the other on some processors."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
    path = os.pathsep.join((str(HERE.parent / "src"), str(HERE.parent)))
    around = {**os.environ, **threads, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    for part in parts:
        with (given.out / f"{part}.txt").open("w") as told:
            for command in commands(part, folder, given.work, ends - time.monotonic()):
                began, left_s = time.monotonic(), ends - time.monotonic()
                pinned = [] if part == "rates" else ["taskset", "-c", ",".join(map(str, cpus))]
                try:
                    subprocess.run(
                        [*pinned, *command], env=around, stdout=told, stderr=subprocess.STDOUT,
                        timeout=max(1.0, left_s), check=False,
                    )  # fmt: skip
                except subprocess.TimeoutExpired:
                    told.write("did not end in time\n")
                told.write(f"# {' '.join(command)}: {time.monotonic() - began:.1f} s\n")
                told.flush()


def main() -> None:
    """Run a part, or all of them in two lanes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=5.5)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--parts", default=",".join(part for lane in LANES for part in lane))
    parser.add_argument("--part", help="run this one, here")
    parser.add_argument("--dtype", default="bf16")
    given = parser.parse_args()
    folder = given.out / "model"
    if given.part == "multiply":
        multiply(1.0)
    elif given.part == "rates":
        rates()
    elif given.part == "steps":
        steps(folder, given.dtype)
    elif given.part in ("one", "two"):
        train(folder, given.out, ("one", "two").index(given.part) + 1)
    else:
        lanes(given)


def lanes(given: argparse.Namespace) -> None:
    """Run all parts."""
    import tempfile

    ends = time.monotonic() + 60.0 * given.minutes
    given.out.mkdir(parents=True, exist_ok=True)
    given.work = Path(tempfile.mkdtemp())
    folder = given.work / "model"
    make_model(folder, given.tokenizer)
    with (given.out / "machine.txt").open("w") as told:
        for command in (["lscpu"], ["lscpu", "-e"], ["uptime"], ["free", "-m"]):
            subprocess.run(command, stdout=told, stderr=subprocess.STDOUT, check=False)
    own, asked = cores(), given.parts.split(",")
    half = max(1, len(own) // 2)
    halves = ([core[0] for core in own[:half]], [core[0] for core in own[half:] or own])
    running = [
        threading.Thread(
            target=run_lane, args=([p for p in lane if p in asked], cpus, given, folder, ends)
        )
        for lane, cpus in zip(LANES, halves, strict=True)
    ]
    for lane in running:
        lane.start()
    for lane in running:
        lane.join()


if __name__ == "__main__":
    main()
