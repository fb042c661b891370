"""Which tiles suit the Triton attention kernels of each width of heads, on this chip.

python benchmarks/attention_tiles.py            # every width, with a soft cap
python benchmarks/attention_tiles.py --width 64 --plain

The table of `tutti.accelerator.cuda.flash.SHAPES` is what it found on an H200.
"""

from __future__ import annotations

import argparse
import itertools

import torch
from triton.testing import do_bench

from tutti.accelerator.cuda import flash
from tutti.accelerator.cuda.flash import Shapes, Tiles
from tutti.accelerator.segments import Segments

HEADS = {64: (64, 8), 128: (32, 8), 256: (8, 4)}
QUERIES, KEYS, WARPS, STAGES = (64, 128), (32, 64, 128), (4, 8), (1, 2, 3)


def seconds(width: int, shapes: Shapes, *, capped: bool, window: int | None) -> tuple[float, float]:
    """Return milliseconds of forward, and of backward, of 2 sequences of 4,096 tokens."""
    flash.SHAPES[width] = shapes
    heads, groups = HEADS[width]
    segments = Segments.batch(2, 4096)
    q = torch.randn(8192, heads, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (
        torch.randn(8192, groups, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2)
    )

    def run() -> torch.Tensor:
        return flash.attention(
            q, k, v, segments, scale=width**-0.5, soft_cap=50.0 if capped else None, window=window
        )

    y = run()
    grad = torch.randn_like(y)
    forward = do_bench(run, warmup=5, rep=20)
    backward = do_bench(
        lambda: torch.autograd.grad(y, (q, k, v), grad, retain_graph=True), warmup=5, rep=20
    )
    return float(forward), float(backward)


def candidates(width: int) -> list[Tiles]:
    """Return tiles whose operands and sums a processor may hold."""
    found = []
    for queries, keys, warps, stages in itertools.product(QUERIES, KEYS, WARPS, STAGES):
        operands = 2 * width * (queries + 2 * keys * stages)
        sums = 4 * width * max(queries, keys)
        if operands < 220_000 and sums <= 32 * warps * 200 * 4 and (queries + keys) * width > 8192:
            found.append(Tiles(queries, keys, warps, stages))
    return found


def tuned(width: int, *, capped: bool, window: int | None) -> Shapes:
    """Return the best tiles of each kernel, found one kernel after the other."""
    best = flash.SHAPES[width]
    for kernel in Shapes._fields:
        which = 0 if kernel == "forward" else 1
        rows = []
        for tiles in candidates(width):
            try:
                ms = seconds(width, best._replace(**{kernel: tiles}), capped=capped, window=window)
            except Exception as error:  # too large for the chip
                print(f"  {kernel} {tuple(tiles)}: {type(error).__name__}", flush=True)
                continue
            rows.append((ms[which], tiles))
        rows.sort()
        print(f"{width} {kernel}:", [(f"{ms:.3f}", tuple(tiles)) for ms, tiles in rows[:4]])
        best = best._replace(**{kernel: rows[0][1]})
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, choices=sorted(HEADS))
    parser.add_argument("--plain", action="store_true", help="without a soft cap")
    parser.add_argument("--window", type=int)
    asked = parser.parse_args()
    for width in [asked.width] if asked.width else sorted(HEADS, reverse=True):
        found = tuned(width, capped=not asked.plain, window=asked.window)
        ms = seconds(width, found, capped=not asked.plain, window=asked.window)
        print(f"{width}: {found}\n  forward {ms[0]:.3f} ms, backward {ms[1]:.3f} ms", flush=True)


if __name__ == "__main__":
    main()
