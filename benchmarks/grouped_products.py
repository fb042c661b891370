"""Experts' products on one chip: grouped ones beside one product per expert, bf16 and 8 bits.

python benchmarks/grouped_products.py --rows 16384 --experts 8 --hidden 4096 --width 14336

One product per expert needs to know on the host how many rows each has; it is what a chip could
reach. Of 8 bits the whole pass is timed, rounding included, and the products alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from triton.testing import do_bench

from tutti.accelerator import open_accelerator
from tutti.accelerator.cuda import narrow, narrow_columns, narrow_experts


def drawn_counts(rows: int, experts: int) -> list[int]:
    """Return unequal loads, as a router without training makes them."""
    choice = torch.randint(experts, (rows,), generator=torch.Generator().manual_seed(0))
    return torch.bincount(choice, minlength=experts).tolist()


def passes(x: Tensor, weight: Tensor, counts: list[int]) -> dict[str, Callable[[], object]]:
    """Return what is timed."""
    sizes = torch.tensor(counts, device=x.device)
    ends = sizes.cumsum(0, dtype=torch.int32)
    g = torch.randn(len(x), weight.shape[1], device=x.device).bfloat16()
    turned = weight.transpose(1, 2)
    own, runs = list(x.split(counts)), list(g.split(counts))
    y, gx, gw = torch.empty_like(g), torch.empty_like(x), torch.empty_like(weight)
    ys, gxs = y.split(counts), gx.split(counts)
    each = range(len(counts))
    scaled = narrow_experts.ScaledGroupedProducts()
    _, kept, scales = scaled.forward(x, weight, ends)
    (columns, column_scales), stops = narrow_columns.narrowed_columns(g, kept.scales, ends)
    rows8 = narrow_columns.turned(kept.values, ends).t()
    ones = torch.ones(len(counts) * x.shape[1], device=x.device)
    weight8 = narrow.narrowed(weight.flatten(0, 1)).values.view(weight.shape).transpose(1, 2)

    def alone(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, offs: Tensor, fast: bool) -> object:
        return torch._scaled_grouped_mm(
            a, b, sa, sb, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    found: dict[str, Callable[[], object]] = {
        "forward, grouped": lambda: torch._grouped_mm(x, turned, offs=ends),
        "forward, each": lambda: [torch.mm(own[e], turned[e], out=ys[e]) for e in each],
        "input, grouped": lambda: torch._grouped_mm(g, weight, offs=ends),
        "input, each": lambda: [torch.mm(runs[e], weight[e], out=gxs[e]) for e in each],
        "weight, grouped": lambda: torch._grouped_mm(g.t(), x, offs=ends),
        "weight, each": lambda: [torch.mm(runs[e].t(), own[e], out=gw[e]) for e in each],
        "forward, 8 bits": lambda: scaled.forward(x, weight, ends),
        "input, 8 bits": lambda: scaled.backward(g, weight, scales, ends),
        "weight, 8 bits": lambda: scaled.of_weight(g, kept, ends),
        "rounding rows of x": lambda: narrow.narrowed(x),
        "rounding rows of g": lambda: narrow.narrowed(g, scales, ends),
        "rounding rows of W": lambda: narrow.narrowed(weight.flatten(0, 1)),
        "turning W": lambda: narrow.narrowed_transpose(weight, scales),
        "rounding columns of g": lambda: narrow_columns.narrowed_columns(g, kept.scales, ends),
        "turning x": lambda: narrow_columns.turned(kept.values, ends),
    }
    assert stops is not None
    for fast in (True, False):
        word = "fast sums" if fast else "careful sums"
        found[f"forward, 8 bits alone, {word}"] = lambda fast=fast: alone(
            kept.values, weight8, kept.scales, scales, ends, fast
        )
        found[f"weight, 8 bits alone, {word}"] = lambda fast=fast: alone(
            columns, rows8, column_scales, ones, stops, fast
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("rows", 16384), ("experts", 8), ("hidden", 4096), ("width", 14336)):
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    device = open_accelerator(None).device
    counts = drawn_counts(asked.rows, asked.experts)
    for out, deep in ((2 * asked.width, asked.hidden), (asked.hidden, asked.width)):
        x = torch.randn(asked.rows, deep, device=device).bfloat16()
        weight = (torch.randn(asked.experts, out, deep, device=device) * deep**-0.5).bfloat16()
        flops = 2.0 * asked.rows * out * deep
        print(f"{asked.rows} rows, {asked.experts} experts of {out} × {deep}")
        for name, run in passes(x, weight, counts).items():
            ms = do_bench(run, warmup=50, rep=200, return_mode="median")
            rate = f"{flops / ms / 1e9:8.0f} TFLOP/s" if "ing " not in name else ""
            print(f"  {name:40} {ms:8.3f} ms {rate}")


if __name__ == "__main__":
    main()
