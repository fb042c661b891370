"""Kernels for NVIDIA GPUs, registered when the first CUDA device is opened."""

from __future__ import annotations

import importlib.util

from tutti.accelerator.registry import register

_done = False


def register_all() -> None:
    """Register every kernel, once; those in Triton only where Triton is installed."""
    global _done
    if _done:
        return
    _done = True
    from tutti.accelerator.cuda import attention, flash4, products

    register(*attention.IMPLEMENTATIONS, *products.IMPLEMENTATIONS)
    if flash4.installed():
        register(*flash4.IMPLEMENTATIONS)
    if importlib.util.find_spec("triton") is not None:
        from tutti.accelerator.cuda import (
            adapted,
            cross_entropy,
            expert_products,
            experts,
            few_rows,
            flash,
            invariant_products,
            layer_norm,
            narrow,
            narrow_experts,
            narrow_rows,
            norm,
            optimizer,
            placed_heads,
            pointwise,
            sampling,
        )
        from tutti.accelerator.cuda.pages import attention as paged
        from tutti.accelerator.cuda.pages import heads, latents, quantised

        for module in (
            adapted, cross_entropy, expert_products, experts, few_rows, flash, heads,
            invariant_products, latents, layer_norm, narrow, narrow_experts, narrow_rows, norm,
            optimizer, paged, placed_heads, pointwise, quantised, sampling,
        ):  # fmt: skip
            register(*module.IMPLEMENTATIONS)
