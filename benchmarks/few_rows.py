"""Time products of few rows: cuBLAS beside Triton kernels of several shapes, bf16 and fp8 weights.

python benchmarks/few_rows.py --rows 1,4,16,64,128
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

SHAPES = {"qkv": (6144, 4096), "out": (4096, 4096), "up": (24576, 4096), "down": (4096, 12288)}
LAYERS = 6  # weights in turn, so that none is found in a cache


@triton.jit
def single(x, w, y, scales, N, K, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
           SCALED: tl.constexpr):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    acc = tl.zeros((BN, BK), tl.float32)
    line = w + n[:, None].to(tl.int64) * K + k[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for start in range(0, K, BK):
        w_nk = tl.load(line + start, mask=(n < N)[:, None] & (start + k < K)[None, :], other=0.0)
        x_k = tl.load(x + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        acc += w_nk.to(tl.float32) * x_k[None, :]
    total = tl.sum(acc, 1)
    if SCALED:
        total *= tl.load(scales + n, mask=n < N, other=0.0)
    tl.store(y + n, total, mask=n < N)


@triton.jit
def few(x, w, y, scales, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
        SCALED: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    m, n, k = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    x_line = x + m[:, None] * K + k[None, :]
    w_line = w + n[None, :].to(tl.int64) * K + k[:, None]
    for start in tl.range(0, K, BK, num_stages=STAGES):
        x_mk = tl.load(x_line + start, mask=(m < M)[:, None], other=0.0)
        w_kn = tl.load(w_line + start, mask=(n < N)[None, :], other=0.0)
        acc = tl.dot(x_mk, w_kn.to(x_mk.dtype), acc)
    if SCALED:
        acc *= tl.load(scales + n, mask=n < N, other=0.0)[None, :]
    tl.store(y + m[:, None] * N + n[None, :], acc, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def swapped(x, w, y, scales, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
            SCALED: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m, k = tl.program_id(1) * BM + tl.arange(0, BM), tl.arange(0, BK)
    acc = tl.zeros((BN, BM), tl.float32)
    x_line = x + m[None, :] * K + k[:, None]
    w_line = w + n[:, None].to(tl.int64) * K + k[None, :]
    for start in tl.range(0, K, BK, num_stages=STAGES):
        w_nk = tl.load(w_line + start, mask=(n < N)[:, None], other=0.0)
        x_km = tl.load(x_line + start, mask=(m < M)[None, :], other=0.0)
        acc = tl.dot(w_nk.to(x_km.dtype), x_km, acc)
    if SCALED:
        acc *= tl.load(scales + n, mask=n < N, other=0.0)[:, None]
    tl.store(y + m[None, :] * N + n[:, None], acc, mask=(m < M)[None, :] & (n < N)[:, None])


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


def candidates(rows: int, x: Tensor, ws: list[Tensor], y: Tensor, scales: Tensor) -> dict[str, Any]:
    """Return what may compute a product."""
    n, k = ws[0].shape
    scaled = ws[0].dtype != x.dtype
    found: dict[str, Any] = {}
    if not scaled:
        found["cublas"] = lambda i: functional.linear(x, ws[i])
    else:
        x8 = x.to(torch.float8_e4m3fn)
        one = torch.ones(rows, 1, device=x.device)
        if rows >= 16:
            found["scaled_mm"] = lambda i: torch._scaled_mm(
                x8, ws[i].t(), scale_a=one, scale_b=scales[None, :], out_dtype=x.dtype)  # fmt: skip
    if rows == 1:
        for bn, bk, warps in (
            (4, 1024, 4),
            (8, 512, 4),
            (8, 1024, 8),
            (4, 2048, 8),
            (16, 512, 8),
            (2, 2048, 4),
            (1, 4096, 4),
        ):
            for pdl in (False, True):

                def run(i: int, bn=bn, bk=bk, warps=warps, pdl=pdl) -> None:
                    single[(triton.cdiv(n, bn),)](x, ws[i], y, scales, n, k, BN=bn, BK=bk, PDL=pdl,
                        SCALED=scaled, num_warps=warps, launch_pdl=pdl)  # fmt: skip

                found[f"single {bn}x{bk}/{warps}{' pdl' if pdl else ''}"] = run
    if rows <= 32:
        for bn, bk, warps, stages in (
            (16, 256, 4, 4),
            (16, 512, 4, 3),
            (32, 256, 4, 4),
            (32, 128, 4, 6),
            (64, 128, 4, 4),
        ):

            def run(i: int, bn=bn, bk=bk, warps=warps, stages=stages) -> None:
                few[(triton.cdiv(n, bn),)](x, ws[i], y, scales, rows, n, k, BM=max(16, rows), BN=bn,
                    BK=bk, SCALED=scaled, STAGES=stages, num_warps=warps)  # fmt: skip

            found[f"few {bn}x{bk}/{warps}/{stages}"] = run
    if rows >= 16:
        for bn, bk, warps, stages in (
            (64, 128, 4, 4),
            (64, 64, 4, 5),
            (128, 64, 8, 4),
            (128, 128, 8, 3),
        ):
            bm = min(128, max(16, triton.next_power_of_2(rows)))

            def run(i: int, bn=bn, bk=bk, warps=warps, stages=stages, bm=bm) -> None:
                swapped[(triton.cdiv(n, bn), triton.cdiv(rows, bm))](x, ws[i], y, scales, rows, n, k,
                    BM=bm, BN=bn, BK=bk, SCALED=scaled, STAGES=stages, num_warps=warps)  # fmt: skip

            found[f"swapped {bn}x{bk}/{warps}/{stages}"] = run
    return found


def main() -> None:
    """Print µs, fastest first."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="1,4,16,64,128")
    parser.add_argument("--top", type=int, default=4)
    given = parser.parse_args()
    for rows in map(int, given.rows.split(",")):
        for kind in ("bf16", "fp8"):
            for name, (n, k) in SHAPES.items():
                x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
                ws = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
                if kind == "fp8":
                    ws = [w.to(torch.float8_e4m3fn) for w in ws]
                y = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
                scales = torch.ones(n, device="cuda")
                right = x.float() @ ws[0].float().t()
                times = {}
                for label, run in candidates(rows, x, ws, y, scales).items():
                    try:
                        y.zero_()
                        made = run(0)
                        off = ((y if made is None else made).float() - right).abs().max().item()
                        times[label] = timed(run)
                        if off > 8:
                            times[label + f" WRONG {off:.1f}"] = times.pop(label)
                    except Exception as error:  # noqa: BLE001
                        times[label + " " + repr(error)[:60]] = 1e6
                floor = n * k * ws[0].element_size() / 4.8e6
                best = sorted(times.items(), key=lambda pair: pair[1])
                shown = [
                    *best[: given.top],
                    *(p for p in best[given.top :] if p[0] in ("cublas", "scaled_mm")),
                ]
                print(f"{rows} {kind} {name} floor {floor:.1f}: "
                      + ", ".join(f"{label} {us:.1f}" for label, us in shown), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
