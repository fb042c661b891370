"""A dense block on a server's rows of few tokens each, as one call of the host.

What it joins are a block's operators, in their order: norms, products, heads to pages, attention to
pages, gate. Who runs blocks asks here first and runs the operators where it says no.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tutti.accelerator.paged_segments import PagedSegments
from tutti.accelerator.prepared import block_product, blocks_of, panels_of, several_threads
from tutti.accelerator.reference.attention import WindowKind, first_key

MOST_ROWS = 128  # tokens of all rows; many are products of their own
MOST_QUERIES = 8  # tokens of a row: each reads its keys, which longer runs read once
VECTOR = 16  # numbers: heads are as wide, or several times
JOINED = {
    "add_rms_norm": "compiled",
    "linear": "prepared",
    "store_heads": "compiled",
    "paged_attention": "host",
    "gated_activation": "compiled",
}
"""What a block's operators have to be for a whole block to do the same."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DenseBlock:
    """A block's weights and constants: norm, attention, norm, silu(gate) · up, down."""

    norms: tuple[Tensor, Tensor]  # before attention, before the feed-forward layer
    head_norms: tuple[Tensor, Tensor] | None  # of queries, of keys
    qkv: Tensor
    output: Tensor
    up: Tensor  # gate and up, one below the other
    down: Tensor
    heads: int
    eps: float
    unit_offset: bool
    interleaved: bool
    scale: float
    window: int | None
    window_kind: WindowKind
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """All that is multiplied with."""
        return (self.qkv, self.output, self.up, self.down)


def refusal(
    x: Tensor, block: DenseBlock, key_pages: Tensor, value_pages: Tensor, steps: PagedSegments
) -> str | None:
    """Say why the operators are to run one by one."""
    rows, width = steps.num_queries, key_pages.shape[-1]
    if steps.most_queries > MOST_QUERIES or not 0 < rows <= MOST_ROWS or rows != len(x):
        return "rows of few tokens only"
    if x.dtype not in (torch.float32, torch.bfloat16) or torch.is_grad_enabled():
        return "float32 and bfloat16 only, no gradients"
    if not x.dtype == key_pages.dtype == value_pages.dtype:
        return "pages of the stream's dtype only"
    if width % VECTOR or value_pages.shape[-1] != width:
        return f"heads as wide as several times {VECTOR}, keys and values alike, only"
    if not (key_pages.is_contiguous() and value_pages.is_contiguous()):
        return "pages without gaps only"
    laid_out: list[Any] = [blocks_of(weight) for weight in block.weights]
    if laid_out[0] is None:
        laid_out = [panels_of(weight) for weight in block.weights]
    if any(each is None for each in laid_out):
        return "the weights lie as they were"
    known = block.kept.get("weights")
    if known is None or known[0] is not laid_out[0]:
        block.kept["weights"] = laid_out
        block.kept["constants"] = _constants(block)
    return None


@torch.no_grad()
def compile_block(block: DenseBlock) -> None:
    """Compile what rows of one token run; many seconds where no cache has it."""
    for weight in block.weights:
        panels_of(weight, now=True)
    dtype, width = block.qkv.dtype, block.output.shape[1] // block.heads
    groups = (block.qkv.shape[0] // width - block.heads) // 2
    x, pages = (torch.zeros(*sizes, dtype=dtype) for sizes in (
        (1, block.qkv.shape[1]), (2, 4, groups, width)
    ))  # fmt: skip
    steps, angles = PagedSegments.of((1,), (1,), [[1]], 4), torch.zeros(1, width // 2)
    if refusal(x, block, pages, pages, steps) is None:
        places = torch.full((1,), 4)
        dense_block(x, None, block, angles, angles, pages, pages.clone(), places, steps)


def _constants(block: DenseBlock) -> tuple[Any, ...]:
    """Return what stays the same from call to call, as the kernel wants it."""
    norms = torch.stack([weight.detach().float() for weight in block.norms]).numpy()
    own = [weight.detach().float() for weight in block.head_norms or ()]
    heads = torch.stack(own).numpy() if own else np.empty((2, 0), np.float32)
    numbers = np.array((block.eps, float(block.unit_offset), block.scale), np.float32)
    return (numbers, block.heads, block.interleaved, norms, heads)


def dense_block(
    x: Tensor,
    added: Tensor | None,
    block: DenseBlock,
    cos: Tensor,
    sin: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    places: Tensor,
    steps: PagedSegments,
) -> tuple[Tensor, Tensor]:
    """Return the stream, what the block before left and attention added, and what is to be added.

    Keys and values are written to their places.
    """
    from tutti.accelerator.host import block_kernels, rows_kernels  # numba's import takes a second

    x = x.contiguous()
    total, more = torch.empty_like(x), torch.empty_like(x)
    owners, positions = steps.rows_and_positions()
    lengths = (positions + 1).clamp_min(1).numpy()  # what fills a step up sees page 0
    firsts = np.zeros(len(lengths), np.int64)
    if block.window is not None:
        last = [first_key(n - 1, block.window, block.window_kind) for n in lengths.tolist()]
        firsts[:] = last
    pages = (
        cos.numpy(), sin.numpy(), _numbers(key_pages), _numbers(value_pages), places.numpy(),
        steps.tables.numpy(), owners.long().numpy(), lengths, firsts,
    )  # fmt: skip
    numbers, heads, interleaved, norms, head_norms = block.kept["constants"]
    weights, several = block.kept["weights"], several_threads()
    if not isinstance(weights[0], Tensor):
        block_kernels.block[several](
            _numbers(x), _numbers(x[:0] if added is None else added.contiguous()), numbers, heads,
            interleaved, norms, head_norms, *weights, *pages, _numbers(total), _numbers(more),
        )  # fmt: skip
        return total, more
    normed = torch.empty_like(x)

    def norm(x: Tensor, added: Tensor | None, weight: Any) -> Tensor:
        """Write a norm; return the sum."""
        total = x if added is None else torch.empty_like(x)
        rows_kernels.add_rms_norm_bits[several](
            _numbers(x), _numbers(x[:0] if added is None else added), weight, numbers[1],
            numbers[0], _numbers(total), _numbers(normed),
        )  # fmt: skip
        return total

    total = norm(x if added is None else added, None if added is None else x, norms[0])
    mixed = block_product(normed, weights[0])
    attended = x.new_empty(len(x), block.output.shape[1])
    block_kernels.heads[several](
        _numbers(mixed), numbers, heads, interleaved, head_norms, *pages, _numbers(attended)
    )
    total = norm(block_product(attended, weights[1]), total, norms[1])
    wide = block_product(normed, weights[2])
    gated = x.new_empty(len(x), block.down.shape[1])
    rows_kernels.gated_silu_bits[several](_numbers(wide), _numbers(gated))
    return total, block_product(gated, weights[3])


def _numbers(tensor: Tensor) -> Any:
    """Return a tensor as numpy has it: bfloat16 as its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
