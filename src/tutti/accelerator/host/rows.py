"""Norms, gates and heads of a server's rows on the host, each in one pass by a compiled loop.

Compiling takes seconds where no cache has it: only operators that were opened for serving come
here (`Operators.as_serving`). The compiler's own import takes a second, which the first answer need
not wait for: until somebody else has imported it, the first calls go the plain way.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from tutti.accelerator.reference import norm, paged, pointwise
from tutti.accelerator.registry import Implementation, register
from tutti.models import Activation

PATIENCE = 240  # calls: a few steps of some tens of layers
MANY = 1 << 16  # numbers from which on several threads are worth their start
LOOPED = (torch.float32, torch.bfloat16)
_NONE = torch.empty(0)


class _Calls:
    """How many calls have gone the plain way."""

    count = 0


def hurry() -> None:
    """Let loops be compiled from the next call on."""
    _Calls.count = PATIENCE


def _waits() -> bool:
    """Tell whether a call goes the plain way, for the compiler is not there yet."""
    if _Calls.count >= PATIENCE or "numba" in sys.modules:
        return False
    _Calls.count += 1
    return True


def _plain(*tensors: Tensor | None) -> str | None:
    """Say why the loops do not take some tensors."""
    first = tensors[0]
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype not in LOOPED or first is None or tensor.dtype is not first.dtype:
            return "float32 or bfloat16 only"
        if tensor.requires_grad and torch.is_grad_enabled():
            return "no gradients"
    return None


def _threads(numbers: int) -> bool:
    """Tell whether several threads share so much work, and let numba have as many as torch."""
    threads = torch.get_num_threads()
    if threads == 1 or numbers < MANY:
        return False
    import numba

    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
    return True


def _number(tensor: Tensor | None) -> Any:
    """Return a tensor as numpy has it: bfloat16 as its bits."""
    own = _NONE if tensor is None else tensor.detach().contiguous()
    return (own.view(torch.uint16) if own.dtype is torch.bfloat16 else own).numpy()


def _float(tensor: Tensor | None) -> Any:
    return _number(None if tensor is None else tensor.detach().float())


def _form(kernels: Any, name: str, x: Tensor) -> Any:
    """Return the loop for x's dtype, for as many threads as pay off."""
    bits = x.dtype is torch.bfloat16
    return getattr(kernels, f"{name}_bits" if bits else name)[_threads(x.numel())]


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    *,
    eps: float,
    unit_offset: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the norm of x + residual, and the sum itself; x where there is no residual."""
    if _waits():
        return norm.add_rms_norm(x, residual, weight, eps=eps, unit_offset=unit_offset)
    from tutti.accelerator.host import rows_kernels

    x = x.detach().contiguous()
    normed = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    other = x[:0] if residual is None else residual
    _form(rows_kernels, "add_rms_norm", x)(
        _number(x), _number(other), _float(weight), 1.0 if unit_offset else 0.0, eps,
        _number(total), _number(normed),
    )  # fmt: skip
    return normed, total


def _supports_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, **_options: Any
) -> str | None:
    return "rows only" if x.dim() != 2 else _plain(x, residual, weight)


def gated_activation(
    x: Tensor, *, kind: Activation, alpha: float = 1.702, limit: float = 7.0
) -> Tensor:
    """Return silu(gate) · up of x (T, 2·F), whose first half is the gate."""
    if _waits():
        return pointwise.gated_activation(x, kind=kind, alpha=alpha, limit=limit)
    from tutti.accelerator.host import rows_kernels

    del kind, alpha, limit
    x = x.detach().contiguous()
    gated = x.new_empty(x.shape[0], x.shape[1] // 2)
    _form(rows_kernels, "gated_silu", x)(_number(x), _number(gated))
    return gated


def _supports_gate(x: Tensor, *, kind: Activation, **_options: Any) -> str | None:
    if kind is not Activation.SILU:
        return "SiLU only"
    return "rows only" if x.dim() != 2 else _plain(x)


def store_heads(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    places: Tensor,
    *,
    heads: int,
    kv_heads: int,
    interleaved: bool = False,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
    unit_offset: bool = False,
) -> Tensor:
    """Return the queries of x (T, heads + 2·kv_heads, D), rotated; write keys and values."""
    if _waits():
        return paged.store_heads(
            x, cos, sin, key_pages, value_pages, places, heads=heads, kv_heads=kv_heads,
            interleaved=interleaved, query_norm=query_norm, key_norm=key_norm, eps=eps,
            unit_offset=unit_offset,
        )  # fmt: skip
    from tutti.accelerator.host import rows_kernels

    del kv_heads
    x = x.detach().contiguous()
    queries = x.new_empty(x.shape[0], heads, x.shape[2])
    _form(rows_kernels, "store_heads", x)(
        _number(x), _number(cos), _number(sin), _number(key_pages.flatten(0, 1)),
        _number(value_pages.flatten(0, 1)), _number(places), _float(query_norm), _float(key_norm),
        1.0 if unit_offset else 0.0, eps, interleaved, _number(queries),
    )  # fmt: skip
    return queries


def _supports_heads(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    places: Tensor,
    **options: Any,
) -> str | None:
    if not key_pages.is_contiguous() or not value_pages.is_contiguous():
        return "pages without gaps only"
    if places.dtype != torch.int64:
        return "places of 64 bits only"
    norms = (options.get("query_norm"), options.get("key_norm"))
    return _plain(cos, sin) or _plain(x, key_pages, value_pages, *norms)


def _loop(operator: str, function: Any, supports: Any) -> Implementation:
    return Implementation(
        operator=operator,
        name="compiled",
        function=function,
        devices=("cpu",),
        supports=supports,
        rank=10,
        exact=False,
        needs="numba",
        serves=True,
    )


register(
    _loop("add_rms_norm", add_rms_norm, _supports_norm),
    _loop("gated_activation", gated_activation, _supports_gate),
    _loop("store_heads", store_heads, _supports_heads),
)
