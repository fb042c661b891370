"""Matrix products in plain torch, fast on processors without half-precision instructions too.

Where the host has no bf16 (fp16) instructions torch multiplies such matrices element by element,
two to three hundred times slower than in float32. There the operands are widened, multiplied in
float32 and the result is rounded: what hardware with the instructions does, and the same accuracy.
Operators multiply through here; which operator runs where is not decided here.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

HALF = (torch.float16, torch.bfloat16)


@functools.cache
def host_multiplies(dtype: torch.dtype) -> bool:
    """Tell whether the host's processor has instructions for products of this dtype.

    oneDNN takes bfloat16 on any processor with AVX-512: without instructions for it every number is
    taken apart, ten times slower than in float32.
    """
    if dtype is torch.bfloat16:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        if not torch.cpu._is_avx512_supported():
            return True  # of another kind, where oneDNN asks for the instructions
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def widens(tensor: Tensor) -> bool:
    """Tell whether products of such a tensor are made in float32 and rounded."""
    return tensor.device.type == "cpu" and not host_multiplies(tensor.dtype)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a·b; of stacks of matrices both have the same leading dimensions."""
    if not widens(a):
        return a @ b
    y: Tensor = _Widened.apply(a, b)
    return y


def linear_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x·Wᵀ + b."""
    if not widens(x):
        return functional.linear(x, weight, bias)
    y = product(x.reshape(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


def write_product(target: Tensor, a: Tensor, b: Tensor) -> None:
    """Write a·b into memory that is there."""
    if widens(a):
        target.copy_(a.float() @ b.float())
    else:
        torch.mm(a, b, out=target)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a·b to a sum, in the sum's precision where the device can."""
    if widens(a):
        if total.dtype is torch.float32:
            total.addmm_(a.float(), b.float())
        else:
            total.add_(a.float() @ b.float())
    elif total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.dtype is torch.float32 and a.dtype in HALF and _adds_wide(total.device.type):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)


class _Widened(torch.autograd.Function):
    """A product in float32 that keeps its operands as they are, not their wide copies."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return (a.float() @ b.float()).to(a.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        wide = gradients[0].float()
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = (wide @ b.float().transpose(-1, -2)).to(a.dtype)
        if ctx.needs_input_grad[1]:
            grad_b = (a.float().transpose(-1, -2) @ wide).to(b.dtype)
        return grad_a, grad_b


@functools.cache
def _adds_wide(device: str) -> bool:
    """Tell whether products of half precision can be written in float32: by trying one."""
    if device == "cpu":
        return False
    try:
        a = torch.ones(8, 8, dtype=torch.bfloat16, device=device)
        total = torch.ones(8, 8, device=device)
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return True
