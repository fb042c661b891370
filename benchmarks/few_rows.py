"""Time products of few rows: cuBLAS beside this repo's kernels with several tiles.

python benchmarks/few_rows.py --rows 1,16,64,128 --kinds bf16,fp8,both8

"both8": rows of x in 8 bits, too. `--warm I/N` compiles every N-th kernel and times nothing.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tutti.accelerator.cuda import few_rows

SHAPES = {"qkv": (6144, 4096), "out": (4096, 4096), "up": (24576, 4096), "down": (4096, 12288)}
LAYERS = 6  # weights in turn, so that none is found in a cache
NARROW = torch.float8_e4m3fn


def timed(run: Callable[[int], Any]) -> float:
    """Return µs of one product, in a graph of several."""
    for layer in range(LAYERS):
        run(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(LAYERS * 4):
            run(layer % LAYERS)
    best = 1e9
    for _ in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end))
    return 1e3 * best / (LAYERS * 4)


def tiles(rows: int, kind: str) -> Iterator[tuple[int, int, int, int]]:
    """Yield outputs and inputs of a step, warps, stages."""
    if rows <= 16:
        yield from (
            (16, 256, 4, 4),
            (32, 128, 4, 5),
            (32, 256, 4, 3),
            (32, 256, 4, 4),
            (64, 128, 4, 4),
        )
    elif kind == "both8":
        yield from (
            (64, 128, 4, 4),
            (64, 256, 4, 3),
            (128, 128, 4, 4),
            (128, 128, 8, 4),
            (128, 256, 8, 3),
        )
    else:
        yield from (
            (32, 128, 4, 4),
            (64, 64, 4, 5),
            (64, 128, 4, 3),
            (64, 128, 8, 4),
            (128, 64, 8, 4),
        )


def candidates(rows: int, kind: str, x: Tensor, ws: list[Tensor], y: Tensor) -> dict[str, Any]:
    """Return what may compute a product."""
    (n, k), found = ws[0].shape, dict[str, Any]()
    scales = torch.ones(n, 1, device=x.device)
    ones = torch.ones(rows, 1, device=x.device)
    if kind == "bf16":
        found["cublas"] = lambda i: functional.linear(x, ws[i])
        codes = [few_rows._Codes.plain(w) for w in ws]
    else:
        codes = [few_rows._Codes(w, scales, None, n, k, 1, 1, k) for w in ws]
    if kind == "both8":
        found["cublas"] = lambda i: torch._scaled_mm(
            x, ws[i].t(), scale_a=ones, scale_b=scales.t(), out_dtype=torch.bfloat16)  # fmt: skip
    if rows <= 4 and kind != "both8":
        found["single"] = lambda i: few_rows._single(y, x, codes[i], None)
    if rows < 2:
        return found
    scales_m = torch.ones(rows, device=x.device) if kind == "both8" else None
    for tile in tiles(rows, kind):

        def run(i: int, tile=tile) -> Tensor:
            few_rows._tile = lambda *_args, **_options: few_rows._Tile(*tile)
            return few_rows.multiplied(x, codes[i], None, scales_m)

        found["few " + "/".join(map(str, tile))] = run
    return found


def main() -> None:
    """Print µs, fastest first."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128")
    parser.add_argument("--kinds", default="bf16,fp8,both8")
    parser.add_argument("--top", type=int, default=3)
    parser.add_argument("--warm", default="")
    given = parser.parse_args()
    mine = [int(part) for part in given.warm.split("/")] if given.warm else None
    number = 0
    for rows, kind in itertools.product(map(int, given.rows.split(",")), given.kinds.split(",")):
        for name, (n, k) in SHAPES.items():
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
            ws = [
                torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
                for _ in range(1 if mine else LAYERS)
            ]
            if kind != "bf16":
                ws = [w.to(NARROW) for w in ws]
            if kind == "both8":
                x = x.to(NARROW)
            y = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
            right = x.float() @ ws[0].float().t()
            times = {}
            for label, run in candidates(rows, kind, x, ws, y).items():
                number += 1
                if mine and number % mine[1] != mine[0]:
                    continue
                try:
                    y.zero_()
                    made = run(0)
                    off = ((y if made is None else made).float() - right).abs().max().item()
                    if mine:
                        continue
                    wrong = f" WRONG {off:.1f}" if off > 0.02 * right.abs().max().item() else ""
                    times[label + wrong] = timed(run)
                except Exception as error:
                    times[label + " " + repr(error)[:60]] = 1e6
            if mine:
                continue
            floor = n * k * ws[0].element_size() / 4.8e6
            best = sorted(times.items(), key=lambda pair: pair[1])
            shown = [*best[: given.top], *(p for p in best[given.top :] if p[0] == "cublas")]
            print(f"{rows} {kind} {name} floor {floor:.1f}: "
                  + ", ".join(f"{label} {us:.1f}" for label, us in shown), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
