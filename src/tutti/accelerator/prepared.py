"""Products with weights that never change again, laid out as the host multiplies few rows fastest.

A trained weight is (out, in). What holds up the host's product of a few rows with it is how its
numbers come into registers: from panels (`host.tiles`) they are read once, in order, while sums
stay where they are. Where every number of a weight is one of bfloat16 or float16 anyway, panels
keep 16 bits of it: half as much is read, widened in registers and multiplied in float32, so that
nothing changes. Many rows go faster with the original, which stays.

Where the processor has matrix units, or instructions, for bfloat16, weights of bfloat16 lie in
oneDNN's blocks instead, which those want.

Panels are made when a weight has met few rows some times: who asks for a short answer once would
wait for them longer than they save.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.products import host_multiplies, linear_product
from tutti.accelerator.registry import Implementation, register

BLOCK_ROWS = 32  # rows that oneDNN's blocks are laid out for; others go through them as well
PANEL = 32  # outputs of a panel, as `host.tiles` has them
MANY = 97  # rows from which on the original is as fast
PATIENCE = 3  # products of few rows before panels are made
_STATE = "_tutti_panels"


class _Layout:
    """What is known of how a weight lies, beside the weight itself."""

    def __init__(self, *, halves: bool) -> None:
        self.halves = halves  # asked for, and possible
        self.met = 0
        self.panels: np.ndarray | None = None
        self.blocks: Tensor | None = None  # oneDNN's


def prepare(weight: Tensor, *, halves: bool = False) -> None:
    """Let a weight be laid out; nothing happens where the host has no faster form of it.

    `halves`: as halves, if all its numbers are some. A weight that has changed is prepared anew.
    """
    if weight.device.type != "cpu" or weight.dim() != 2:
        return
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return
    halves = halves and has_halves() and _are(torch.float16, weight.detach())
    layout = _Layout(halves=halves)
    setattr(weight, _STATE, layout)
    if weight.dtype is torch.bfloat16 and host_multiplies(torch.bfloat16):
        layout.blocks = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), BLOCK_ROWS)


@functools.cache
def has_halves() -> bool:
    """Tell whether the host widens halves in registers."""
    import llvmlite.binding

    features = llvmlite.binding.get_host_cpu_features()
    return bool(features.get("f16c")) or "fullfp16" in features


def is_in_halves(weight: Tensor) -> bool:
    """Tell whether a prepared weight lies in 16 bits because that was asked for."""
    layout = getattr(weight, _STATE, None)
    return layout is not None and layout.halves


def round_to_halves(weight: Tensor) -> bool:
    """Let every number of a weight be the nearest half; False if one is beyond them: all stay."""
    halves = weight.detach().half()
    if not torch.isfinite(halves).all():
        return False
    weight.data.copy_(halves)
    return True


def blocks_of(weight: Tensor) -> Tensor | None:
    """Return a prepared weight as oneDNN has it; None where panels are the better form."""
    layout: _Layout | None = getattr(weight, _STATE, None)
    return None if layout is None else layout.blocks


def panels_of(weight: Tensor, *, now: bool = False) -> np.ndarray | None:
    """Return a prepared weight's panels (out ÷ 32, in, 32); None before there are any."""
    layout: _Layout | None = getattr(weight, _STATE, None)
    if layout is None or layout.panels is not None or layout.blocks is not None:
        return None if layout is None else layout.panels
    layout.met += 1
    if layout.met > PATIENCE or now:
        layout.panels = _panels(weight.detach(), halves=layout.halves)
    return layout.panels


def _panels(weight: Tensor, *, halves: bool) -> np.ndarray:
    out, width = weight.shape
    kind = torch.float16 if halves else torch.float32
    if weight.dtype is torch.bfloat16 or (not halves and _are(torch.bfloat16, weight)):
        kind = torch.bfloat16
    number = -(-out // PANEL)
    panels = torch.zeros(number, width, PANEL, dtype=kind)
    whole = out // PANEL
    panels[:whole].copy_(weight[: whole * PANEL].view(whole, PANEL, width).transpose(1, 2))
    if whole < number:
        panels[whole, :, : out - whole * PANEL].copy_(weight[whole * PANEL :].t())
    bits = {torch.float16: torch.int16, torch.bfloat16: torch.uint16}.get(kind, kind)
    return panels.view(bits).numpy()


def _are(kind: torch.dtype, weight: Tensor) -> bool:
    """Tell whether all numbers of a weight of float32 are some of a narrower format."""
    if weight.dtype is not torch.float32:
        return False
    row = weight[0]
    if not torch.equal(row.to(kind).float(), row):
        return False
    return torch.equal(weight.to(kind).float(), weight)


def supports(x: Tensor, weight: Tensor, bias: Tensor | None = None, **_options: Any) -> str | None:
    """Say why a call cannot go through it."""
    del bias
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return "no gradients"
    if x.dim() != 2 or x.dtype != weight.dtype:
        return "rows of the weight's own dtype only"
    if not hasattr(weight, _STATE):
        return "the weight is not prepared"
    return None


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, later: WeightGradients | None = None
) -> Tensor:
    """Return x·Wᵀ + b."""
    del later
    rows, blocks = x.shape[0], blocks_of(weight)
    if blocks is not None:
        return block_product(x, blocks, bias)
    panels = panels_of(weight) if 0 < rows < MANY else None
    if panels is None:
        return linear_product(x, weight, bias)
    from tutti.accelerator.host import tiles  # numba's import takes a second

    y = torch.empty(rows + 1, panels.shape[0] * PANEL)
    wide = torch.empty(rows + 1, x.shape[1])
    wide[:rows].copy_(x)
    tiles.linear[several_threads()](wide.numpy(), rows, panels, y.numpy())
    y = y[:rows, : weight.shape[0]]
    y = y if bias is None else y.add_(bias)
    return y.to(x.dtype) if x.dtype is not torch.float32 else y


def block_product(x: Tensor, blocks: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x·Wᵀ + b with a weight in oneDNN's blocks."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, blocks, bias, "none", [], "")
    return y


def several_threads() -> bool:
    """Tell whether compiled loops run on several threads; they have as many as torch."""
    threads = torch.get_num_threads()
    if threads == 1:
        return False
    import numba

    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
    return True


register(
    Implementation(
        operator="linear",
        name="prepared",
        function=linear,
        devices=("cpu",),
        supports=supports,
        rank=20,
        exact=False,
        needs="numba",
    )
)
