"""Products of few rows, plain and with weights of 8 or 4 bits, for inference."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tutti.accelerator.cuda import few_rows_kernels as kernels
from tutti.accelerator.cuda.common import DTYPES, power_of_two, zero_counters
from tutti.accelerator.cuda.early_launch import early
from tutti.accelerator.cuda.narrow import has_narrow_products, narrowed
from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.quantised import QuantisedWeight
from tutti.accelerator.reference.narrow import NARROW, NarrowRows
from tutti.accelerator.registry import Implementation

FEW_ROWS = 128  # rows of x in one tile; more are multiplied with the weight widened
MULTIPLE = 16  # of the inner dimension
UNITS = 132  # of a chip; twice as many programs keep it busy


class _Tile(NamedTuple):
    """Outputs and inputs of a step, warps, pipeline stages."""

    outputs: int
    inputs: int
    warps: int
    stages: int


class _Codes(NamedTuple):
    """A weight as the kernels see it."""

    codes: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    out: int
    width: int
    scale_row: int
    scale_height: int
    group: int  # inputs that share a scale

    @classmethod
    def plain(cls, weight: Tensor) -> _Codes:
        """Return a weight that has no scales."""
        out, width = weight.shape
        return cls(weight, None, None, out, width, 1, 1, width)

    @classmethod
    def of(cls, weight: QuantisedWeight) -> _Codes:
        """Return a weight of 8 or 4 bits."""
        out, width = weight.shape
        height = out if weight.scales.shape[0] == 1 else weight.block[0]
        group = width if weight.scales.shape[1] == 1 else weight.block[1]
        scales, zeros = weight.scales, weight.zeros
        zeros = None if zeros is None else zeros.contiguous()
        return cls(
            weight.codes, scales.contiguous(), zeros, out, width, scales.shape[1], height, group
        )

    @property
    def halves(self) -> bool:
        return self.scales is not None and self.codes.dtype == torch.uint8

    @property
    def switches(self) -> dict[str, Any]:
        scaled = 0 if self.scales is None else 1 if self.group >= self.width else 2
        return {"HALVES": self.halves, "SCALED": scaled, "HAS_ZERO": self.zeros is not None}

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.out, self.width, self.scale_row, self.scale_height, self.group

    def step(self, wanted: int) -> int:
        """Return the inputs of one step: within a group, and a power of two."""
        step = wanted
        while self.group < self.width and self.group % step:
            step //= 2
        return step


def multiplied(
    x: Tensor, weight: _Codes, bias: Tensor | None, x_scales: Tensor | None = None
) -> Tensor:
    """Return x·Wᵀ + b of at most `FEW_ROWS` rows, of 8 bits where they have scales."""
    dtype = x.dtype if x_scales is None else torch.bfloat16
    y = x.new_empty(x.shape[0], weight.out, dtype=dtype)
    if x.shape[0] == 1 and x_scales is None:
        _single(y, x, weight, bias)
    else:
        _few(y, x, x_scales, weight, bias)
    return y


def _single(y: Tensor, x: Tensor, weight: _Codes, bias: Tensor | None) -> None:
    step = weight.step(1024 if weight.halves else 512)
    warps = 4 if weight.scales is None else 8
    outputs = max(1, warps * (2048 if weight.halves else 1024) // step)
    kernels.multiply_single[(-(-weight.out // outputs),)](
        x, weight.codes, weight.scales, weight.zeros, bias, y, *weight.sizes, BN=outputs,
        BK=step // 2 if weight.halves else step, EVEN=weight.width % step == 0,
        HAS_BIAS=bias is not None, **weight.switches, num_warps=warps, **early(x),
    )  # fmt: skip


def _few(
    y: Tensor, x: Tensor, x_scales: Tensor | None, weight: _Codes, bias: Tensor | None
) -> None:
    rows = max(16, power_of_two(x.shape[0]))
    tile = _tile(rows, x.dtype, narrow=x_scales is not None)
    step = weight.step(tile.inputs)
    programs = -(-weight.out // tile.outputs)
    narrow = x_scales is not None and rows > 16
    wanted = round(UNITS / programs) if narrow else -(-2 * UNITS // programs)
    splits = max(1, min(8, wanted, weight.width // (2 * step)))
    parts = y if splits == 1 else y.new_empty((splits, *y.shape), dtype=torch.float32)
    counters = zero_counters(y.device, programs) if splits > 1 else y
    kernels.multiply_few[(programs, splits)](
        x, weight.codes, x_scales, weight.scales, weight.zeros, bias, y, parts, counters,
        x.stride(0), x.shape[0], *weight.sizes, BM=rows, BN=tile.outputs,
        BK=step // 2 if weight.halves else step, SPLITS=splits, EVEN=weight.width % step == 0,
        NARROW=x_scales is not None, HAS_BIAS=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", **weight.switches,
        num_warps=tile.warps, num_stages=tile.stages, **early(x),
    )  # fmt: skip


def _tile(rows: int, dtype: torch.dtype, *, narrow: bool) -> _Tile:
    """Return how a product is cut, by its rows: measured on an H200."""
    if dtype == torch.float32:
        return _Tile(32, 64, 4, 1)
    if rows <= 16:
        return _Tile(32, 256, 4, 4)
    if narrow:
        return _Tile(64, 256, 4, 3)
    return _Tile(64, 128, 4, 3) if rows == 32 else _Tile(64, 64, 4, 5)


def widened(weight: _Codes, dtype: torch.dtype) -> Tensor:
    """Return the weight that codes stand for."""
    y = torch.empty(weight.out, weight.width, dtype=dtype, device=weight.codes.device)
    step = weight.step(256)
    outputs = max(1, 4096 // step)
    switches = weight.switches
    del switches["SCALED"]
    kernels.widen[(-(-weight.width // step), -(-weight.out // outputs))](
        weight.codes, weight.scales, weight.zeros, y, *weight.sizes, BN=outputs,
        BK=step // 2 if weight.halves else step, **switches, num_warps=4,
    )  # fmt: skip
    return y


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, later: WeightGradients | None = None
) -> Tensor:
    """Return x·Wᵀ + b of few rows."""
    del later
    return multiplied(x, _Codes.plain(weight), bias)


def quantised_linear(
    x: Tensor | NarrowRows, weight: QuantisedWeight, bias: Tensor | None = None
) -> Tensor:
    """Return x·Wᵀ + b of a weight of 8 or 4 bits; what it stands for is never rounded."""
    codes = _laid_out(weight)
    if isinstance(x, NarrowRows):
        return _narrow(x, codes, bias)
    rows = weight.inputs(x.reshape(-1, codes.width))
    if weight.narrow_inputs:
        y = _narrow(NarrowRows(*narrowed(rows), x.dtype), codes, bias)
    elif rows.shape[0] <= FEW_ROWS:
        y = multiplied(rows, codes, bias)
    else:
        y = functional.linear(rows, widened(codes, x.dtype), bias)
    return y.view(*x.shape[:-1], codes.out)


def _narrow(x: NarrowRows, weight: _Codes, bias: Tensor | None) -> Tensor:
    """Return x·Wᵀ + b of products in 8 bits."""
    few = x.values.shape[0] <= FEW_ROWS
    if x.dtype != torch.bfloat16 or not _multiplies_narrow(weight):
        if few:
            return multiplied(x.wide(), weight, bias)
        return functional.linear(x.wide(), widened(weight, x.dtype), bias)
    if few:
        return multiplied(x.values, weight, bias, x.scales)
    assert weight.scales is not None
    scales = weight.scales.expand(weight.out, 1).float().t().contiguous()
    y = torch._scaled_mm(
        x.values, weight.codes.t(), x.scales.unsqueeze(1), scales, out_dtype=x.dtype,
        use_fast_accum=True,
    )  # fmt: skip
    return y if bias is None else y + bias


def _multiplies_narrow(weight: _Codes) -> bool:
    """Tell whether matrix units take the codes as they are."""
    if weight.codes.dtype != NARROW or weight.group < weight.width:
        return False
    if weight.scale_height not in (1, weight.out):
        return False
    return weight.out % MULTIPLE == 0 and has_narrow_products(weight.codes.device)


def _laid_out(weight: QuantisedWeight) -> _Codes:
    """Return a weight as the kernels see it; made once."""
    if "cuda" not in weight.laid_out:
        weight.laid_out["cuda"] = _Codes.of(weight)
    made: _Codes = weight.laid_out["cuda"]
    return made


def _supports(x: Tensor, weight: Tensor, bias: Tensor | None = None, **_options: Any) -> str | None:
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return "no gradients"
    if x.dim() != 2 or x.shape[0] != 1:  # cuBLAS is as fast beyond
        return "one row only"
    if x.dtype not in DTYPES or weight.dtype != x.dtype or not weight.is_contiguous():
        return "a contiguous weight of the rows' dtype only"
    if weight.shape[1] % MULTIPLE or x.stride(1) != 1:
        return f"rows without gaps, of a multiple of {MULTIPLE} elements only"
    if bias is not None and bias.dtype not in DTYPES:
        return f"no bias in {bias.dtype}"
    return "being compiled" if torch.compiler.is_compiling() else None


def _supports_quantised(
    x: Tensor | NarrowRows, weight: QuantisedWeight, bias: Tensor | None = None, **_options: Any
) -> str | None:
    del bias
    rows = x.values if isinstance(x, NarrowRows) else x
    if torch.is_grad_enabled() and rows.requires_grad:
        return "no gradients"
    if x.dtype not in DTYPES or not rows.numel():
        return "rows of float32, bfloat16 or float16 only"
    if not weight.codes.is_contiguous() or len(weight.shape) != 2:
        return "one matrix of codes without gaps only"
    if weight.shape[1] % MULTIPLE or _Codes.of(weight).step(512) < MULTIPLE:
        return f"groups of a multiple of {MULTIPLE} inputs only"
    return "being compiled" if torch.compiler.is_compiling() else None


IMPLEMENTATIONS = (
    Implementation(
        operator="linear", name="few_rows", function=linear, devices=("cuda",),
        supports=_supports, rank=20, exact=False, needs="triton",
    ),
    Implementation(
        operator="quantised_linear", name="triton", function=quantised_linear, devices=("cuda",),
        supports=_supports_quantised, rank=20, exact=False, needs="triton",
    ),
)  # fmt: skip
