"""Is arithmetic right in processes that share one GPU under MPS? Products, then whole steps.

    python benchmarks/mps_check.py --parts 75,25       # on a machine with one large GPU
    python benchmarks/mps_check.py --rehearse          # the same script on CPU processes, tiny

Every part runs at the same time. Each compares the products of a Llama block in bf16 with the same
products in float32, by rows, under each way torch can be told to call cuBLAS; then it runs training
steps of a job of one rank and prints losses and norms, which must be those of the whole GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from mixed_gpus import limits, shared_device

from tutti.accelerator import open_accelerator
from tutti.accelerator.reference.optimizer import AdamSettings
from tutti.models.load import catalog_config
from tutti.models.spec import ModelSpec
from tutti.nn.batch import Batch
from tutti.nn.initialize import initialize
from tutti.plan.job import PRECISIONS
from tutti.train.alone import NoLinks, plan_alone
from tutti.train.engine import Engine

PRODUCTS = {"qkv": (2048, 3072), "out": (2048, 2048), "up": (2048, 16384), "down": (8192, 2048)}
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
    spec = ModelSpec.from_config(config, "llama-3.2-1b")
    plan = plan_alone(
        spec, sequence_length=args.length, micro_batch=1, micro_batches=args.micro_batches,
        precision=PRECISIONS["fp32" if args.rehearse else "bf16"],
    )  # fmt: skip
    engine = Engine(plan, spec, 0, accelerator, NoLinks(), clip_norm=1.0)
    initialize(engine.model)  # type: ignore[arg-type]
    engine.take_masters()
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(0, spec.vocab, (args.length + 1,), generator=generator)
             for _ in range(args.micro_batches)]  # fmt: skip

    def batch(index: int) -> Batch:
        tokens = drawn[index].to(accelerator.device)
        return Batch.of(spec, tokens[:-1], [args.length], targets_t=tokens[1:])

    results = [engine.step(batch, SETTINGS) for _ in range(args.steps)]
    return {"losses": [r.loss for r in results], "norms": [r.gradient_norm for r in results]}


def part(args: argparse.Namespace) -> None:
    """Run one part's checks."""
    device = "cpu" if args.rehearse else "cuda"
    found: dict[str, object] = {}
    if not args.rehearse:
        found["processors"] = torch.cuda.get_device_properties(0).multi_processor_count
    sizes = [64] if args.rehearse else [2048, 4096, 8192]
    for library in ("default",) if args.rehearse else ("default", "cublas", "cublaslt"):
        if library != "default":
            torch.backends.cuda.preferred_blas_library(library)
        for name, (inner, columns) in PRODUCTS.items():
            for rows in sizes:
                shape = (rows, inner // 32, columns // 32) if args.rehearse else None
                wrong = wrong_product(*(shape or (rows, inner, columns)), torch.device(device))
                if max(float(wrong[k]) for k in ("y", "dx", "dw")) > 0.1 or len(wrong) > 3:
                    found[f"{library} {name} {rows}"] = wrong
    found["steps"] = steps(args, device)
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="75,25")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        part(args)
        return
    own = [sys.executable, __file__, "--part", *sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if not args.rehearse:
            print("whole", subprocess.run(own, capture_output=True, text=True).stdout.strip())
            stack.enter_context(shared_device(Path(folder)))
        running = [
            (share, subprocess.Popen(own, env={**os.environ, **limits(int(share))},
                                     stdout=subprocess.PIPE, text=True))
            for share in args.parts.split(",")
        ]  # fmt: skip
        for share, process in running:
            print(share, process.communicate()[0].strip(), flush=True)


if __name__ == "__main__":
    main()
