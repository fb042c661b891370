"""Products with quantised weights on the host.

"tiles": some rows of the weight become float32 in a piece of memory that stays in the cache, and
are multiplied with all rows of x, then the next: a weight is read in as few bytes as it has. It is
right for every form. "packed": torch's own kernels for 8 and 4 bits, where the processor multiplies
in bfloat16; in float32 these run element by element.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tutti.accelerator import invariant
from tutti.accelerator.products import host_multiplies
from tutti.accelerator.quantised.weight import FLOATS, QuantisedWeight
from tutti.accelerator.reference.narrow import NarrowRows
from tutti.accelerator.reference.quantised import as_multiplied
from tutti.accelerator.registry import Implementation, register

TILE_BYTES = 1 << 19  # of float32: half of a core's second cache, beside x
PACK_ROWS, PACK_GROUPS = 64, (32, 64, 128, 256)  # outputs and groups that torch's kernel takes
_WIDENED, _PACKED = "widened", "packed"


def prepare(weight: QuantisedWeight) -> None:
    """Lay a weight out for the host's products."""
    if weight.device.type != "cpu":
        return
    if len(weight.shape) == 2 and host_multiplies(torch.bfloat16) and _packs(weight):
        weight.laid_out[_PACKED] = _pack(weight)
    else:
        _scaling(weight)


# --- tiles ---------------------------------------------------------------------------------


def tiles(x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None) -> Tensor:
    """Return x·Wᵀ + b."""
    out, width = weight.shape
    rows = weight.inputs(x.reshape(-1, width)).float()
    y = torch.empty(rows.shape[0], out)
    for first, part in _parts(weight, rows.shape[0]):
        torch.mm(rows, part.t(), out=y[:, first : first + part.shape[0]])
    y = y.to(x.dtype)
    return (y if bias is None else y + bias).view(*x.shape[:-1], out)


def _parts(weight: QuantisedWeight, rows: int) -> Iterator[tuple[int, Tensor]]:
    """Yield runs of the weight's rows as float32, each in the memory of the one before."""
    import numba  # here: whoever never comes by need not wait for its import

    out, width = weight.shape
    threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    if threads > 1:
        numba.set_num_threads(threads)
    count = min(out, max(16, threads * TILE_BYTES // (4 * width)))
    buffer = torch.empty(count, width)
    for first in range(0, out if rows else 0, count):
        part = buffer[: min(count, out - first)]
        _fill(part.numpy(), weight, first, together=threads > 1)
        yield first, part


def _fill(out: np.ndarray, weight: QuantisedWeight, first: int, *, together: bool) -> None:
    """Write rows of a weight as float32."""
    from tutti.accelerator.host import quantised_kernels as kernels

    scales, zeros = _scaling(weight)
    if weight.codes.dtype not in FLOATS:
        kernel = kernels.of_int4 if weight.halves else kernels.of_int8
        kernel[together](out, weight.codes.numpy(), scales, zeros, *weight.block, first)
        return
    four = weight.codes.dtype == torch.float8_e4m3fn  # bits of the exponent; else five
    form = (20, 120, np.float32(2.0**-6)) if four else (21, 112, np.float32(2.0**-14))
    codes = weight.codes.view(torch.uint8).numpy()
    bits = out.view(np.int32)
    kernels.of_float8[together](out, bits, codes, scales, *weight.block, first, *form)


def _scaling(weight: QuantisedWeight) -> tuple[np.ndarray, np.ndarray]:
    """Return scales and zeros in float32; they are made once."""
    if _WIDENED not in weight.laid_out:
        zeros = torch.empty(0, 0) if weight.zeros is None else weight.zeros
        made = tuple(part.float().contiguous().numpy() for part in (weight.scales, zeros))
        weight.laid_out[_WIDENED] = made
    widened: tuple[np.ndarray, np.ndarray] = weight.laid_out[_WIDENED]
    return widened


def _supports_tiles(
    x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None, **_options: Any
) -> str | None:
    del bias
    if weight.narrow_inputs:
        return "inputs as they are only"
    if torch.is_grad_enabled() and x.requires_grad:
        return "no gradients"
    if x.dtype == torch.float64:
        return "float32 and narrower only"
    if not weight.codes.is_contiguous():
        return "codes without gaps only"
    return None


def grouped_tiles(
    x: Tensor, weight: QuantisedWeight, counts: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return runs of rows times their expert's weight; experts without rows are not touched."""
    experts = weight.laid_out.setdefault("experts", {})
    runs = []
    for e, run in enumerate(x.split(counts.tolist())):
        if run.shape[0]:
            own = experts.setdefault(e, weight.expert(e))
            runs.append(tiles(run, own, None if bias is None else bias[e]))
    return torch.cat(runs) if runs else x.new_zeros(0, weight.shape[-2])


def _supports_grouped(
    x: Tensor, weight: QuantisedWeight, counts: Tensor, bias: Tensor | None = None
) -> str | None:
    del counts
    return _supports_tiles(x, weight, bias)


# --- torch's own kernels -------------------------------------------------------------------


def _packs(weight: QuantisedWeight) -> bool:
    """Tell whether torch has a kernel for a weight."""
    out, width = weight.shape
    if weight.order is not None or weight.block[0] != 1:
        return False
    if weight.kind == "int8":
        return weight.zeros is None and weight.block[1] == width
    return weight.kind == "int4" and weight.block[1] in PACK_GROUPS and out % PACK_ROWS == 0


def _pack(weight: QuantisedWeight) -> tuple[Tensor, Tensor]:
    if weight.kind == "int8":
        return weight.codes, weight.scales.flatten().bfloat16()
    codes = weight.numbers(torch.int32) + 8
    zeros = 0 if weight.zeros is None else weight.zeros.float()
    scales = weight.scales.float()
    both = torch.stack((scales.t(), (-zeros * scales).t()), dim=-1)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    return packed, both.bfloat16().contiguous()


def packed(x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None) -> Tensor:
    """Return x·Wᵀ + b by torch's kernels."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    first, second = weight.laid_out[_PACKED]
    if weight.kind == "int8":
        y = torch._weight_int8pack_mm(rows, first, second)
    else:
        group = weight.block[1]
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, first, group, second)
    return (y if bias is None else y + bias).view(*x.shape[:-1], weight.shape[0])


def _supports_packed(
    x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None, **_options: Any
) -> str | None:
    reason = _supports_tiles(x, weight, bias)
    if reason is None and x.dtype != torch.bfloat16:
        return "bfloat16 only"
    if reason is None and _PACKED not in weight.laid_out:
        return "the weight is not prepared"
    return reason


# --- the same bits in any batch ------------------------------------------------------------


def unchanging(
    x: Tensor | NarrowRows, weight: QuantisedWeight, bias: Tensor | None = None
) -> Tensor:
    """Return x·Wᵀ + b, blocks of rows one after the other."""
    x = as_multiplied(x, weight)
    return invariant.linear(x, weight.dequantised(x.dtype), bias)


def grouped_unchanging(
    x: Tensor, weight: QuantisedWeight, counts: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return runs of rows times their expert's weight, in blocks."""
    runs = [
        unchanging(run, weight.expert(e), None if bias is None else bias[e])
        for e, run in enumerate(x.split(counts.tolist()))
        if run.shape[0]
    ]
    return torch.cat(runs) if runs else x.new_zeros(0, weight.shape[-2])


register(
    Implementation(
        operator="quantised_linear", name="packed", function=packed, devices=("cpu",), rank=20,
        supports=_supports_packed, exact=False,
    ),
    Implementation(
        operator="quantised_linear", name="tiles", function=tiles, devices=("cpu",), rank=10,
        supports=_supports_tiles, exact=False,
    ),
    Implementation(
        operator="quantised_grouped_linear", name="tiles", function=grouped_tiles,
        devices=("cpu",), rank=10, supports=_supports_grouped, exact=False, asks_host=True,
    ),
    Implementation(
        operator="quantised_linear", name="invariant", function=unchanging, devices=("cpu",),
        rank=-10, exact=False, invariant=True,
    ),
    Implementation(
        operator="quantised_grouped_linear", name="invariant", function=grouped_unchanging,
        devices=("cpu",), rank=-10, exact=False, asks_host=True, invariant=True,
    ),
)  # fmt: skip
