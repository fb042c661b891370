"""Is arithmetic right in processes that share one GPU under MPS? Products, then whole steps.

    python benchmarks/mps_check.py --parts 75,25       # on a machine with one large GPU
    python benchmarks/mps_check.py --probe 70,72,75,78 # which parts multiply right, and leaving out
                                                       # how many processors helps
    python benchmarks/mps_check.py --rehearse          # the same script on CPU processes, tiny

Every part runs at the same time. Each compares the products of a Llama block in bf16 with the same
products in float32, by rows, under each way torch can be told to call cuBLAS; then it runs training
steps of a job of one rank, once per implementation of attention, and prints losses and norms, which
must be those of the whole GPU. A part that hangs prints where.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from mixed_gpus import limits, shared_device

from tutti.accelerator import open_accelerator
from tutti.accelerator.reference.optimizer import AdamSettings
from tutti.models import read_config
from tutti.models.load import catalog_config
from tutti.nn.batch import Batch
from tutti.nn.initialize import initialize
from tutti.plan.job import PRECISIONS
from tutti.ranks.single_rank import NoLinks, plan_alone
from tutti.train.engine.engine import Engine

PRODUCTS = {"qkv": (2048, 3072), "out": (2048, 2048), "up": (2048, 16384), "down": (8192, 2048)}
BEGIN = time.perf_counter()
SETTINGS = AdamSettings(learning_rate=1e-4)


def wrong_product(rows: int, inner: int, columns: int, device: torch.device) -> dict[str, object]:
    """Return how far y = xW, its gradients and their float32 twins are apart."""
    generator = torch.Generator(device).manual_seed(rows + inner + columns)

    def drawn(*shape: int) -> torch.Tensor:
        made = torch.randn(*shape, device=device, generator=generator)
        return made.to(torch.bfloat16)

    x, w, g = drawn(rows, inner), drawn(columns, inner), drawn(rows, columns)
    found: dict[str, object] = {}
    for name, a, b in (("y", x, w.T), ("dx", g, w), ("dw", g.T, x)):
        got = a @ b
        exact = a.float() @ b.float()
        scale = float(exact.square().mean().sqrt())
        found[name] = float((got.float() - exact).abs().max()) / scale
        if not bool(torch.isfinite(got).all()):
            places = (~torch.isfinite(got)).nonzero()
            found[f"{name}_not_finite"] = [len(places), places[0].tolist(), places[-1].tolist()]
    return found


def steps(args: argparse.Namespace, device: str) -> dict[str, object]:
    """Return losses and norms of a job of one rank."""
    accelerator = open_accelerator(device)
    config = dict(catalog_config("llama-3.2-1b")) | {"num_hidden_layers": args.layers}
    if args.rehearse:
        config |= {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
    spec = read_config(config, "llama-3.2-1b")
    plan = plan_alone(
        spec, sequence_length=args.length, micro_batch=1, micro_batches=args.micro_batches,
        precision=PRECISIONS["fp32" if args.rehearse else "bf16"],
    )  # fmt: skip
    engine = Engine(plan, spec, 0, accelerator, NoLinks(), clip_norm=1.0)
    initialize(engine.model)
    engine.take_masters()
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(0, spec.vocab, (args.length + 1,), generator=generator)
             for _ in range(args.micro_batches)]  # fmt: skip

    def batch(index: int) -> Batch:
        tokens = drawn[index].to(accelerator.device)
        return Batch.of(spec, tokens[:-1], [args.length], targets_t=tokens[1:])

    results = [engine.step(batch, SETTINGS) for _ in range(args.steps)]
    return {"losses": [r.loss for r in results], "norms": [r.gradient_norm for r in results]}


def wrong_products(args: argparse.Namespace, device: torch.device) -> dict[str, object]:
    """Return the products of a block that are wrong, by name and rows."""
    found: dict[str, object] = {}
    for name, (inner, columns) in PRODUCTS.items():
        for rows in [64] if args.rehearse else [2048, 4096, 8192]:
            shape = (rows, inner // 32, columns // 32) if args.rehearse else (rows, inner, columns)
            wrong = wrong_product(*shape, device)
            if max(float(wrong[k]) for k in ("y", "dx", "dw")) > 0.1 or len(wrong) > 3:
                found[f"{name} {rows}"] = wrong
    return found


def probe(args: argparse.Namespace) -> None:
    """Say how many of the products are wrong when the library may use fewer processors."""
    found: dict[str, object] = {
        "processors": torch.cuda.get_device_properties(0).multi_processor_count
    }
    for left_out in (None, 0, 2, 4, 8, 16, 32):
        torch._C._set_sm_carveout_experimental(left_out)
        found[f"without {left_out}"] = len(wrong_products(args, torch.device("cuda")))
    torch._C._set_sm_carveout_experimental(None)
    say(args, found)


def part(args: argparse.Namespace) -> None:
    """Run one part's checks."""
    faulthandler.dump_traceback_later(args.patience_s, repeat=False, exit=True)
    device = "cpu" if args.rehearse else "cuda"
    found: dict[str, object] = {}
    if not args.rehearse:
        found["processors"] = torch.cuda.get_device_properties(0).multi_processor_count
    for library in ("default",) if args.rehearse else ("default", "cublas", "cublaslt"):
        if library != "default":
            torch.backends.cuda.preferred_blas_library(library)
        wrong = wrong_products(args, torch.device(device))
        found |= {f"{library} {name}": how for name, how in wrong.items()}
    say(args, found)
    for operators in [""] if args.rehearse else ["", "attention=flash", "attention=sdpa"]:
        os.environ["TUTTI_OPERATORS"] = operators
        say(args, {operators or "as chosen": steps(args, device)})


def say(args: argparse.Namespace, found: dict[str, object]) -> None:
    """Print at once: the next thing may hang."""
    print(args.name, f"{time.perf_counter() - BEGIN:.0f} s", json.dumps(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="75,25")
    parser.add_argument("--probe", default="", help="parts, in per cent, one after the other")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--patience-s", type=float, default=60.0)
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        (probe if args.probe else part)(args)
        return

    def start(share: str) -> subprocess.Popen[bytes]:
        few = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 4))}
        limit = limits(int(share)) if share != "whole" else {}
        own = [sys.executable, __file__, "--part", "--name", share, *sys.argv[1:]]
        return subprocess.Popen(own, env={**os.environ, **few, **limit})

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if args.probe:
            stack.enter_context(shared_device(Path(folder)))
            sys.exit(max(start(share).wait() for share in args.probe.split(",")))
        if not args.rehearse:
            start("whole").wait()
            stack.enter_context(shared_device(Path(folder)))
        running = [start(share) for share in args.parts.split(",")]
        sys.exit(max(process.wait() for process in running))


if __name__ == "__main__":
    main()
