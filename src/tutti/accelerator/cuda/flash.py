"""Attention with every mask, cap, bias and sink in Triton; memory is linear in the sequence.

What the kernels walk over stands in tables of tiles on the device, made once per `Segments`, so
that rectangles, packed documents and the tail of a sequence go through the same kernels.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tutti.accelerator.cuda import flash_kernels as kernels
from tutti.accelerator.cuda.common import power_of_two
from tutti.accelerator.host_to_device import moved
from tutti.accelerator.key_runs import followed, scattered
from tutti.accelerator.registry import Implementation
from tutti.accelerator.scaled_dot_product import aligned
from tutti.accelerator.segments import Segments

LOG2E = 1.4426950408889634
WIDEST_HEAD = 256
WINDOWS = {"sliding": 1, "chunked": 2}
_HALF = (torch.bfloat16, torch.float16)


class Tiles(NamedTuple):
    """How a kernel cuts its work: queries and keys of a tile, warps, stages of its pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


class Shapes(NamedTuple):
    """The tiles of the three kernels for one width of heads."""

    forward: Tiles
    of_queries: Tiles
    of_keys: Tiles


# by the padded width of a head; measured on an H200 by benchmarks/attention_tiles.py
SHAPES = {
    64: Shapes(Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(128, 64, 4, 2)),
    128: Shapes(Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
    256: Shapes(Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 3), Tiles(128, 32, 8, 2)),
}


@functools.lru_cache(maxsize=64)  # every layer of a batch asks for the same
def _query_tiles(segments: Segments, size: int, device: torch.device) -> Tensor:
    """Return for each tile: first query, queries and keys from there, first key, position.

    Where all keys lie before all queries, positions say nothing; they must not be negative.
    """
    rows = [
        (start + at, queries - at, first, keys, (0 if segments.across else keys - queries) + at)
        for start, queries, first, keys in _runs(segments)
        for at in range(0, queries, size)
    ]
    # the longest first: short ones fill the gaps at the end
    rows.sort(key=lambda tile: -tile[4])
    return moved(torch.tensor(rows, dtype=torch.int32), device)


@functools.lru_cache(maxsize=64)
def _key_tiles(segments: Segments, size: int, device: torch.device) -> Tensor:
    """Return for each tile: first key, keys from there, first query, queries, positions of both."""
    rows = [
        (first + at, keys - at, start, queries, at, 0 if segments.across else keys - queries)
        for start, queries, first, keys in _runs(segments)
        for at in range(0, keys, size)
    ]
    rows.sort(key=lambda tile: tile[4])
    return moved(torch.tensor(rows, dtype=torch.int32), device)


def _runs(segments: Segments) -> zip[tuple[int, int, int, int]]:
    return zip(
        segments.query_starts, segments.queries, segments.key_starts, segments.keys, strict=True
    )


class Call(NamedTuple):
    """What all kernels of a call are told."""

    segments: Segments
    scale: float
    cap: float
    window: int
    switches: dict[str, int | bool]

    def numbers(self) -> tuple[float, float, int]:
        """Return what changes from model to model without another kernel."""
        return self.scale, self.cap, self.window


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    window_kind: str = "sliding",
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    key_bias: Tensor | None = None,
) -> Tensor:
    """Return (T, H, E), as the reference does."""
    if window is not None and window >= max(segments.keys):
        window = None
    k, v, segments = followed(k, v, segments)
    call = Call(
        segments, scale, 1.0 if soft_cap is None else soft_cap, window or 1,
        {
            **_widths(q, k, v), "CAUSAL": causal,
            "WINDOW": 0 if window is None else WINDOWS[window_kind],
            "HAS_CAP": soft_cap is not None, "HAS_BIAS": key_bias is not None,
        },
    )  # fmt: skip
    y: Tensor = _Attention.apply(aligned(q), aligned(k), aligned(v), sinks, key_bias, call)[0]
    return y


def attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, scale: float, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """Return attention and its log-sum-exp (T, H), both with gradients."""
    k, v, segments = followed(k, v, segments)
    switches = {"CAUSAL": causal, "WINDOW": 0, "HAS_CAP": False, "HAS_BIAS": False}
    call = Call(segments, scale, 1.0, 1, {**_widths(q, k, v), **switches})
    y, lse_ht = _Attention.apply(aligned(q), aligned(k), aligned(v), None, None, call)
    return y, lse_ht.t() / LOG2E


def _widths(q: Tensor, k: Tensor, v: Tensor) -> dict[str, int | bool]:
    return {
        "GROUP": q.shape[1] // k.shape[1], "D": q.shape[2], "E": v.shape[2],
        "WIDE_D": max(16, power_of_two(q.shape[2])), "WIDE_E": max(16, power_of_two(v.shape[2])),
    }  # fmt: skip


def _shapes(call: Call) -> Shapes:
    wide = max(int(call.switches["WIDE_D"]), int(call.switches["WIDE_E"]))
    return SHAPES[next(width for width in SHAPES if wide <= width)]


def _steps(*tensors: Tensor) -> tuple[int, ...]:
    """Return from row to row and from head to head, of each."""
    return tuple(step for tensor in tensors for step in tensor.stride()[:2])


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: Tensor | None,
        call: Call,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        tiles = _shapes(call).forward
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
        table = _query_tiles(call.segments, tiles.queries, q.device)
        kernels.forward[(table.shape[0], q.shape[1])](
            q, k, v, out, lse, table, q if sinks is None else sinks, q if bias is None else bias,
            *_steps(q, k, v, out), lse.stride(0), 0 if bias is None else bias.stride(0),
            *call.numbers(), **call.switches, HAS_SINK=sinks is not None, M=tiles.queries,
            N=tiles.keys, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse, sinks, bias)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks, bias = ctx.saved_tensors
        of_out, of_lse = gradients
        grad = torch.zeros_like(out) if of_out is None else aligned(of_out)
        delta = (out.float() * grad.float()).sum(-1).t().contiguous()
        if of_lse is not None:  # a score moves ln Σ exp by its probability
            delta -= of_lse * LOG2E
        grad_q, grad_k, grad_v = _gradients(ctx.call, q, k, v, grad, delta, lse, bias)
        grad_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            share = torch.exp2(sinks.float().unsqueeze(1) * LOG2E - lse)
            grad_sinks = -(share * delta).sum(1).to(sinks.dtype)
        return grad_q, grad_k, grad_v, grad_sinks, None, None


def _gradients(
    call: Call, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, delta: Tensor, lse: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grad_q, grad_k, grad_v = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)
    )
    near, near_step = (q, 0) if bias is None else (bias, bias.stride(0))
    tiles = _shapes(call).of_queries
    table = _query_tiles(call.segments, tiles.queries, q.device)
    kernels.backward_queries[(table.shape[0], q.shape[1])](
        q, k, v, grad, delta, lse, grad_q, table, near, *_steps(q, k, v, grad, grad_q),
        lse.stride(0), near_step, *call.numbers(), **call.switches, M=tiles.queries, N=tiles.keys,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    tiles = _shapes(call).of_keys
    table = _key_tiles(call.segments, tiles.keys, q.device)
    kernels.backward_keys[(table.shape[0], k.shape[1])](
        q, k, v, grad, delta, lse, grad_k, grad_v, table, near,
        *_steps(q, k, v, grad, grad_k, grad_v), lse.stride(0), near_step, *call.numbers(),
        **call.switches, M=tiles.queries, N=tiles.keys, num_warps=tiles.warps,
        num_stages=tiles.stages,
    )  # fmt: skip
    return grad_q, grad_k, grad_v


def _supports(q: Tensor, k: Tensor, v: Tensor, segments: Segments, **options: Any) -> str | None:
    del k
    if q.dtype not in _HALF:
        return "bfloat16 and float16 only"
    if max(q.shape[-1], v.shape[-1]) > WIDEST_HEAD or q.shape[-1] % 8 or v.shape[-1] % 8:
        return f"heads of a multiple of 8, up to {WIDEST_HEAD}, only"
    reason = scattered(segments)
    if reason is not None:
        return reason
    bias = options.get("key_bias")
    if bias is not None and not segments.keys_follow:
        return "a key bias of keys that follow each other only"
    if bias is not None and (bias.requires_grad or bias.stride(-1) != 1):
        return "no gradients of a key bias"
    return "being compiled" if torch.compiler.is_compiling() else None


IMPLEMENTATIONS = (
    Implementation(
        operator="attention", name="triton", function=attention, devices=("cuda",),
        supports=_supports, rank=12, needs="triton",
    ),
    Implementation(
        operator="attention_with_lse", name="triton", function=attention_with_lse,
        devices=("cuda",), supports=_supports, rank=12, needs="triton",
    ),
)  # fmt: skip
