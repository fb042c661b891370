"""Keys and values of earlier tokens, for inference: where attention writes and what it reads.

A cache attends: it gets the new tokens' queries, keys and values of a unit, stores what later
tokens will see, and returns the attention's result. What it stores and where is its own business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from tutti.accelerator.host.block import DenseBlock
from tutti.accelerator.operators import Operators
from tutti.accelerator.paged_segments import PagedSegments
from tutti.accelerator.reference.attention import WindowKind
from tutti.models import AttentionSpec, ModelSpec
from tutti.models.cached import page_shapes
from tutti.nn.parallel.groups import ALONE, ParallelContext
from tutti.nn.rotary import Table

QUANTISED = 4  # tensors of a unit whose keys and values are codes: these, and their scales


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Scores:
    """What a layer does to its attention scores."""

    scale: float
    window: int | None = None
    window_kind: WindowKind = "sliding"
    soft_cap: float | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None  # ALiBi's, of this rank's heads
    slopes_rounded: bool = False
    slopes_factor: float = 1.0


SCORES = tuple(field.name for field in fields(Scores))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HeadPlacing:
    """What happens to queries and keys before attention, head by head."""

    heads: int
    kv_heads: int
    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    eps: float = 0.0
    unit_offset: bool = False

    def options(self) -> dict[str, Any]:
        """Return all but the tables, by name."""
        names = (field.name for field in fields(self))
        return {name: getattr(self, name) for name in names if name not in ("cos", "sin")}


class Cache(Protocol):
    """What attention needs of a cache."""

    def attend(
        self, unit: int, q_thd: Tensor, k_tgd: Tensor, v_tge: Tensor, scores: Scores
    ) -> Tensor:
        """Store a unit's new keys and values; return (T, H, E)."""

    def attend_heads(
        self, unit: int, x_tnd: Tensor, placing: HeadPlacing, scores: Scores
    ) -> Tensor | None:
        """Norm, turn and store heads as they come; None: that is to be done one by one."""

    def run_block(
        self, unit: int, x: Tensor, added: Tensor | None, block: DenseBlock, table: Table
    ) -> tuple[Tensor, Tensor] | None:
        """Run a whole block; None: it is to be run operator by operator."""

    def attend_latents(
        self, unit: int, q_thr: Tensor, latents_tr: Tensor, *, rank: int, scale: float
    ) -> Tensor:
        """Store a unit's new latents; return (T, H, rank)."""


class PagedCache:
    """Pages of every unit's keys and values (or latents), at addresses that never change.

    Page p of one unit belongs to the same tokens as page p of every other. `begin` says which rows
    the next batch has. With `codes` (int8 or an 8-bit float) keys and values are stored so, each
    head of a token with a scale of its own; latents stay what they are.
    """

    def __init__(
        self,
        spec: ModelSpec,
        operators: Operators,
        *,
        pages: int,
        page_size: int,
        units: range | None = None,
        parallel: ParallelContext = ALONE,
        dtype: torch.dtype = torch.float32,
        codes: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.operators, self.pages, self.page_size = operators, pages, page_size
        self.dtype = dtype
        self.units: dict[int, tuple[Tensor, ...]] = {}
        for unit in range(1, spec.num_layers + 1):
            if units is not None and unit not in units:
                continue
            self.units[unit] = tuple(
                torch.empty(pages, page_size, *shape, dtype=kind, device=device)
                for shape, kind in page_parts(
                    spec.block(unit).attention, parallel.tensor.size, dtype, codes
                )
            )
            for tensor in self.units[unit]:  # stands in for pages behind a window: unseen, but read
                tensor[0] = 0
        self._steps: PagedSegments | None = None
        self._places_t: Tensor | None = None
        self.on_stored: Callable[[int], None] | None = None  # hears of a unit's new numbers
        self.steps_apart = False  # whoever looks into modules wants blocks' operators one by one

    def begin(self, steps: PagedSegments, row_t: Tensor, position_t: Tensor) -> None:
        """Take the next batch: its rows, and where each of its tokens belongs."""
        self._steps, self._places_t = steps, steps.places(row_t, position_t)

    def attend(
        self, unit: int, q_thd: Tensor, k_tgd: Tensor, v_tge: Tensor, scores: Scores
    ) -> Tensor:
        """Store a unit's new keys and values; return (T, H, E)."""
        assert self._places_t is not None
        keys, values, *scales = self.units[unit]
        new = (k_tgd, v_tge, keys, values)
        if scales:
            self.operators.store_quantised_pages(*new, scales[0], scales[1], self._places_t)
        else:
            self.operators.store_pages(*new, self._places_t)
        self._stored(unit)
        return self._attended(unit, q_thd, scores)

    def attend_heads(
        self, unit: int, x_tnd: Tensor, placing: HeadPlacing, scores: Scores
    ) -> Tensor | None:
        """Norm, turn and store heads as they come; None where the device does not in one pass."""
        if not self.operators.stores_heads() or len(self.units[unit]) == QUANTISED:
            return None
        assert self._places_t is not None
        keys, values = self.units[unit]
        q_thd = self.operators.store_heads(
            x_tnd,
            placing.cos,
            placing.sin,
            keys,
            values,
            self._places_t,
            **placing.options(),
        )
        self._stored(unit)
        return self._attended(unit, q_thd, scores)

    def run_block(
        self, unit: int, x: Tensor, added: Tensor | None, block: DenseBlock, table: Table
    ) -> tuple[Tensor, Tensor] | None:
        """Run a whole block of a model, where the device does so in one pass; None: it does not."""
        if self.steps_apart or len(self.units[unit]) == QUANTISED:
            return None
        assert self._places_t is not None
        assert self._steps is not None
        keys, values = self.units[unit]
        ran = self.operators.joined_block(
            x, added, block, *table, keys, values, self._places_t, self._steps
        )
        if ran is not None:
            self._stored(unit)
        return ran

    def _stored(self, unit: int) -> None:
        if self.on_stored is not None:
            self.on_stored(unit)

    def _attended(self, unit: int, q_thd: Tensor, scores: Scores) -> Tensor:
        assert self._steps is not None
        keys, values, *scales = self.units[unit]
        options: dict[str, Any] = {name: getattr(scores, name) for name in SCORES}
        if scales:
            return self.operators.quantised_paged_attention(
                q_thd, keys, values, scales[0], scales[1], self._steps, **options
            )
        return self.operators.paged_attention(q_thd, keys, values, self._steps, **options)

    def attend_latents(
        self, unit: int, q_thr: Tensor, latents_tr: Tensor, *, rank: int, scale: float
    ) -> Tensor:
        """Store a unit's new latents; return (T, H, rank)."""
        assert self._steps is not None
        assert self._places_t is not None
        (pages,) = self.units[unit]
        self.operators.store_latents(latents_tr, pages, self._places_t)
        self._stored(unit)
        return self.operators.latent_attention(q_thr, pages, self._steps, rank=rank, scale=scale)

    def asks_host(self, unit: int, spec: AttentionSpec) -> bool:
        """Tell whether a unit's attention reads numbers off the device: no graph can hold it."""
        pages = self.units[unit]
        steps = PagedSegments.of((1,), (1,), ((0,),), self.page_size, pages[0].device)
        heads = pages[0].shape[2] if spec.latent is None else 1
        q = torch.empty(1, heads, pages[0].shape[-1], dtype=self.dtype, device=pages[0].device)
        if spec.latent is not None:
            rank = spec.latent.kv_rank
            call = self.operators.chosen("latent_attention", q, *pages, steps, rank=rank, scale=1.0)
        else:
            name = "quantised_paged_attention" if len(pages) == QUANTISED else "paged_attention"
            call = self.operators.chosen(name, q, *pages, steps, scale=1.0)
        return call.asks_host

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy pages to others, of every unit."""
        for tensors in self.units.values():
            for tensor in tensors:
                tensor[targets] = tensor[sources]


def page_parts(
    spec: AttentionSpec, tensor_ranks: int, dtype: torch.dtype, codes: torch.dtype | None
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of one token in each tensor of a unit; scales come behind codes."""
    shapes = page_shapes(spec, tensor_ranks)
    if codes is None or spec.latent is not None:
        return [(shape, dtype) for shape in shapes]
    return [(shape, codes) for shape in shapes] + [(shape[:1], torch.float32) for shape in shapes]


def token_bytes(
    spec: ModelSpec,
    dtype: torch.dtype,
    units: range | None = None,
    tensor_ranks: int = 1,
    codes: torch.dtype | None = None,
) -> int:
    """Return how many bytes of pages one token takes on a rank."""
    return sum(
        torch.Size(shape).numel() * kind.itemsize
        for unit in range(1, spec.num_layers + 1)
        if units is None or unit in units
        for shape, kind in page_parts(spec.block(unit).attention, tensor_ranks, dtype, codes)
    )
