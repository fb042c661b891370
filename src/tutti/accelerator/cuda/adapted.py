"""What adapters add to products: two kernels at fixed addresses, which a graph can hold.

A program takes a tile of rows and goes through the adapters that its rows have, each once: in the
order that steps give, rows of one adapter stand together, so that most tiles have one. Which those
are is read on the device.
`_shrink` multiplies with A, its inputs cut into splits of which the last to come adds up all;
`_expand` multiplies with B and adds the product's own output.

Letters: M rows, R ranks, K inputs, N outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tutti.accelerator.cuda.common import power_of_two, reason_against, zero_counters
from tutti.accelerator.cuda.early_launch import early, wait
from tutti.accelerator.registry import Implementation

FEW, MANY = 16, 64  # rows of a tile
MANY_ROWS = 1024  # from here on tiles are large
OUTPUTS, INPUTS, MOST_RANKS = 64, 64, 128  # of a program; of a step; of a program
PROGRAMS = 264  # keep a chip of 132 units busy
FIXED_SPLITS = 8  # where results may not depend on how many rows there are
LEAST_SPLIT = 256  # inputs


@triton.jit
def _has(adapter_m, adapter):
    """Tell whether a row of a tile has an adapter."""
    return tl.max((adapter_m == adapter).to(tl.int32), 0) > 0


@triton.jit(do_not_specialize=["rows"])
def _shrink(
    x, down, adapters, order, shrunk, parts, counters, x_row, rows, width, ranks, count,
    BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
    EVEN: tl.constexpr, ORDERED: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write what A of each row's adapter makes of it (T, R), in their order; zeros for none."""
    tile, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m, r, at = tile * BM + tl.arange(0, BM), block * BR + tl.arange(0, BR), tl.arange(0, BK)
    wait(EARLY)
    row_m = tl.load(order + m, mask=m < rows, other=0) if ORDERED else m
    adapter_m = tl.load(adapters + row_m, mask=m < rows, other=-1)
    sum_mr = tl.zeros((BM, BR), tl.float32)
    each = tl.cdiv(tl.cdiv(width, BK), SPLITS) * BK
    begin = split * each
    for adapter in range(count):
        if _has(adapter_m, adapter):
            own_m = (adapter_m == adapter)[:, None]
            place = down + (adapter * ranks + r[:, None]).to(tl.int64) * width
            for start in range(begin, min(begin + each, width), BK):
                k = (start + at)[None, :]
                inside = own_m if EVEN else own_m & (k < width)
                known = (r < ranks)[:, None]
                x_mk = tl.load(x + row_m[:, None].to(tl.int64) * x_row + k, mask=inside, other=0.0)
                a_rk = tl.load(place + k, mask=known if EVEN else known & (k < width), other=0.0)
                sum_mr = tl.dot(x_mk, tl.trans(a_rk), sum_mr, input_precision=PRECISION)
    inside = (m < rows)[:, None] & (r < ranks)[None, :]
    to = m[:, None] * ranks + r[None, :]
    if SPLITS > 1:
        tl.store(parts + split * rows * ranks + to, sum_mr, mask=inside)
        tl.debug_barrier()
        counter = counters + tile * tl.num_programs(1) + block
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(counter, 0)  # as the next call wants to find it
            sum_mr = tl.zeros_like(sum_mr)
            for other in range(SPLITS):
                sum_mr += tl.load(parts + other * rows * ranks + to, mask=inside, other=0.0)
            tl.store(shrunk + to, sum_mr.to(shrunk.dtype.element_ty), mask=inside)
    else:
        tl.store(shrunk + to, sum_mr.to(shrunk.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _expand(
    y, shrunk, up, adapters, order, out, y_row, rows, width, ranks, count,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, ORDERED: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write y plus what B of each row's adapter makes of what A left (T, N)."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    at = tl.arange(0, BR)
    wait(EARLY)
    inside = (m < rows)[:, None] & (n < width)[None, :]
    row_m = tl.load(order + m, mask=m < rows, other=0) if ORDERED else m
    line = row_m[:, None].to(tl.int64)
    adapter_m = tl.load(adapters + row_m, mask=m < rows, other=-1)
    sum_mn = tl.zeros((BM, BN), tl.float32)
    for adapter in range(count):
        if _has(adapter_m, adapter):
            own_m = (adapter_m == adapter)[:, None]
            place = up + (adapter * width + n[:, None]).to(tl.int64) * ranks
            for start in range(0, ranks, BR):
                r = (start + at)[None, :]
                s_mr = tl.load(shrunk + m[:, None] * ranks + r, mask=own_m & (r < ranks), other=0.0)
                known = (n < width)[:, None] & (r < ranks)
                b_nr = tl.load(place + r, mask=known, other=0.0)
                sum_mn = tl.dot(s_mr, tl.trans(b_nr), sum_mn, input_precision=PRECISION)
    y_mn = tl.load(y + line * y_row + n[None, :], mask=inside, other=0.0)
    dtype: tl.constexpr = y_mn.dtype
    # rounded as a product is, so that a row without an adapter keeps its bits
    total = y_mn.to(tl.float32) + sum_mn.to(dtype).to(tl.float32)
    tl.store(out + line * width + n[None, :], total.to(dtype), mask=inside)


def adapted_linear(
    y: Tensor, x: Tensor, down: Tensor, up: Tensor, adapters: Tensor, order: Tensor | None = None
) -> Tensor:
    """Return y plus what each row's adapter adds."""
    tile = FEW if x.shape[0] < MANY_ROWS else MANY
    programs = -(-x.shape[0] // tile) * -(-down.shape[1] // MOST_RANKS)
    return _added(y, x, down, up, (adapters, order), tile, -(-PROGRAMS // programs))


def unchanging(
    y: Tensor, x: Tensor, down: Tensor, up: Tensor, adapters: Tensor, order: Tensor | None = None
) -> Tensor:
    """Return the same, with the same bits whatever the other rows are."""
    return _added(y, x, down, up, (adapters, order), FEW, FIXED_SPLITS)


def _added(
    y: Tensor, x: Tensor, down: Tensor, up: Tensor,
    of_rows: tuple[Tensor, Tensor | None], tile: int, wanted: int,
) -> Tensor:  # fmt: skip
    adapters, order = of_rows[0], of_rows[0] if of_rows[1] is None else of_rows[1]
    ordered = of_rows[1] is not None
    (rows, width), (count, ranks, _), out = x.shape, down.shape, y.shape[1]
    block = min(MOST_RANKS, max(16, power_of_two(ranks)))
    tiles, blocks = -(-rows // tile), -(-ranks // block)
    splits = max(1, min(FIXED_SPLITS, wanted, width // LEAST_SPLIT))
    shrunk = x.new_empty(rows, ranks)
    parts = counters = shrunk
    if splits > 1:
        parts = x.new_empty((splits, rows, ranks), dtype=torch.float32)
        counters = zero_counters(x.device, power_of_two(tiles * blocks))
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    _shrink[(tiles, blocks, splits)](
        x, down, adapters, order, shrunk, parts, counters, x.stride(0), rows, width, ranks, count,
        BM=tile, BR=block, BK=INPUTS, SPLITS=splits, EVEN=width % INPUTS == 0, ORDERED=ordered,
        PRECISION=precision, num_warps=4, num_stages=1 if x.dtype == torch.float32 else 3,
        **early(x),
    )  # fmt: skip
    added = y.new_empty(rows, out)
    _expand[(tiles, -(-out // OUTPUTS))](
        y, shrunk, up, adapters, order, added, y.stride(0), rows, out, ranks, count, BM=tile,
        BN=OUTPUTS, BR=min(64, block), ORDERED=ordered, PRECISION=precision, num_warps=4,
        num_stages=1, **early(x),
    )  # fmt: skip
    return added


def _reason(
    y: Tensor,
    x: Tensor,
    down: Tensor,
    up: Tensor,
    adapters: Tensor,
    order: Tensor | None = None,
    **_options: Any,
) -> str | None:
    """Say why the kernels cannot take a call, or None."""
    del adapters, order
    if torch.is_grad_enabled() and (y.requires_grad or x.requires_grad):
        return "no gradients"
    if len({tensor.dtype for tensor in (y, x, down, up)}) > 1:
        return "rows and adapters of one dtype only"
    if not (down.is_contiguous() and up.is_contiguous()):
        return "adapters without gaps only"
    return reason_against(y, x)


IMPLEMENTATIONS = (
    Implementation(
        operator="adapted_linear", name="triton", function=adapted_linear, devices=("cuda",),
        supports=_reason, rank=20, exact=False, needs="triton",
    ),
    Implementation(
        operator="adapted_linear", name="fixed", function=unchanging, devices=("cuda",),
        supports=_reason, rank=-10, exact=False, needs="triton", invariant=True,
    ),
)  # fmt: skip
