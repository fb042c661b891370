"""The operators that only inference needs: pages of keys and values, and the choice of a token."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any, Self

from torch import Tensor

from tutti.accelerator import invariant, paged, prepared  # noqa: F401  (they register)
from tutti.accelerator.choices import Choices
from tutti.accelerator.eight_bit_support import Narrowing
from tutti.accelerator.host import adapted, quantised, quantised_pages, rows  # noqa: F401
from tutti.accelerator.host import block as joined
from tutti.accelerator.paged_segments import PagedSegments
from tutti.accelerator.quantised import QuantisedWeight
from tutti.accelerator.quantised.frozen_products import frozen_grouped_linear, frozen_linear
from tutti.accelerator.reference.attention import WindowKind
from tutti.accelerator.reference.narrow import NarrowRows
from tutti.accelerator.registry import Implementation, implementations
from tutti.errors import InputError
from tutti.models import Activation

# others work row by row
INVARIANT = (
    "linear", "grouped_linear", "quantised_linear", "quantised_grouped_linear", "adapted_linear",
    "paged_attention", "activation", "gated_activation",
)  # fmt: skip


class Inference(Narrowing):
    """Operators of a server."""

    choices: Choices
    forced: dict[str, str]
    device_type: str
    _candidates: dict[str, list[Implementation]]

    def _run(self, operator: str, *args: Any, **options: Any) -> Any:
        raise NotImplementedError

    def as_invariant(self, needed: Collection[str] = INVARIANT) -> Self:
        """Return operators whose results for a row do not depend on the other rows, bit for bit.

        Those that are not `needed` may be missing. Nothing is chosen by size any more: what was
        measured fastest for few rows may add up otherwise than what is for many.
        """
        steady = copy.copy(self)
        steady._candidates, steady.choices = dict(self._candidates), Choices()
        for name in INVARIANT:
            own = [i for i in self._candidates[name] if i.invariant]
            if not own and name in needed:
                raise InputError(f"this device has no batch-invariant operator '{name}'")
            steady._candidates[name] = own
        return steady

    def as_serving(self) -> Self:
        """Return operators with what pays off for who runs steps for a long time.

        An implementation that the user named stays the only one.
        """
        serving = copy.copy(self)
        serving._candidates = {
            name: own if name in self.forced else list(implementations(name, self.device_type))
            for name, own in self._candidates.items()
        }
        return serving

    def joins_blocks(self) -> bool:
        """Tell whether a dense block may run as one: its operators are those that it joins."""
        own = {name: self._candidates[name] for name in joined.JOINED}
        return all(each and each[0].name == joined.JOINED[name] for name, each in own.items())

    def joined_block(
        self,
        x: Tensor,
        added: Tensor | None,
        block: joined.DenseBlock,
        cos: Tensor,
        sin: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        places: Tensor,
        steps: PagedSegments,
    ) -> tuple[Tensor, Tensor] | None:
        """Return what a block's operators would, one by one: the stream, and what is to be added.

        None: they are to run, for rows of several tokens for instance.
        """
        if joined.refusal(x, block, key_pages, value_pages, steps) is not None:
            return None
        return joined.dense_block(x, added, block, cos, sin, key_pages, value_pages, places, steps)

    def prepare(self, weight: Tensor | QuantisedWeight, *, halves: bool = False) -> None:
        """Lay out a weight that will not change any more, for products of few rows.

        `halves`: in 16 bits, where its numbers have no more and the device widens them faster.
        """
        if isinstance(weight, QuantisedWeight):
            quantised.prepare(weight)
        else:
            prepared.prepare(weight, halves=halves)

    def narrow_rms_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        *,
        eps: float,
        unit_offset: bool = False,
    ) -> tuple[NarrowRows, Tensor]:
        """Return the norm of x + residual in 8 bits, and the sum; x where there is no residual."""
        values, scales, total = self._run(
            "narrow_rms_norm", x, residual, weight, eps=eps, unit_offset=unit_offset
        )
        return NarrowRows(values, scales, x.dtype), total

    def narrow_gated_activation(
        self, x: Tensor, *, kind: Activation, alpha: float = 1.702, limit: float = 7.0
    ) -> NarrowRows:
        """Return act(gate) · up in 8 bits; x is [gate | up]."""
        values, scales = self._run(
            "narrow_gated_activation", x, kind=kind, alpha=alpha, limit=limit
        )
        return NarrowRows(values, scales, x.dtype)

    def quantised_linear(
        self, x: Tensor | NarrowRows, weight: QuantisedWeight, bias: Tensor | None = None
    ) -> Tensor:
        """Return x·Wᵀ + b of a weight of 8 or 4 bits; what it stands for, rounded to x's dtype."""
        if weight.widens:
            assert isinstance(x, Tensor)
            return frozen_linear(x, weight, bias)
        y: Tensor = self._run("quantised_linear", x, weight, bias)
        return y

    def quantised_grouped_linear(
        self, x: Tensor, weight: QuantisedWeight, counts: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Return runs of `counts[e]` rows times expert e's weight of 8 or 4 bits."""
        if weight.widens:
            return frozen_grouped_linear(x, weight, counts, bias)
        y: Tensor = self._run("quantised_grouped_linear", x, weight, counts, bias)
        return y

    def adapted_linear(
        self, y: Tensor, x: Tensor, down: Tensor, up: Tensor, adapters: Tensor,
        order: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return y (T, out) plus up[a]·down[a]·x of each row's adapter a (T,); −1: nothing.

        `order` (T,): the rows, those of one adapter together.
        """
        added: Tensor = self._run("adapted_linear", y, x, down, up, adapters, order)
        return added

    def store_pages(
        self, k: Tensor, v: Tensor, key_pages: Tensor, value_pages: Tensor, places: Tensor
    ) -> None:
        """Write keys (T, G, D) and values (T, G, E) to places of pages (P, size, G, D or E)."""
        self._run("store_pages", k, v, key_pages, value_pages, places)

    def store_quantised_pages(
        self,
        k: Tensor,
        v: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        key_scales: Tensor,
        value_scales: Tensor,
        places: Tensor,
    ) -> None:
        """Write keys and values to places of 8-bit pages, scales (P, size, G) beside them."""
        self._run(
            "store_quantised_pages", k, v, key_pages, value_pages, key_scales, value_scales, places
        )

    def quantised_paged_attention(
        self,
        q: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        key_scales: Tensor,
        value_scales: Tensor,
        steps: PagedSegments,
        **options: Any,
    ) -> Tensor:
        """Return what `paged_attention` does, with its options, of keys and values of 8 bits."""
        y: Tensor = self._run(
            "quantised_paged_attention",
            q,
            key_pages,
            value_pages,
            key_scales,
            value_scales,
            steps,
            **options,
        )
        return y

    def store_latents(self, latents: Tensor, pages: Tensor, places: Tensor) -> None:
        """Write latents (T, R) to places of pages (P, size, R)."""
        self._run("store_latents", latents, pages, places)

    def store_heads(
        self,
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
        """Return queries of x (T, heads + 2·kv_heads, D), normed and rotated; write the rest."""
        y: Tensor = self._run(
            "store_heads",
            x,
            cos,
            sin,
            key_pages,
            value_pages,
            places,
            heads=heads,
            kv_heads=kv_heads,
            interleaved=interleaved,
            query_norm=query_norm,
            key_norm=key_norm,
            eps=eps,
            unit_offset=unit_offset,
        )
        return y

    def stores_heads(self) -> bool:
        """Tell whether a device writes heads to pages in one pass; else parts of it may be."""
        return self._candidates["store_heads"][0].name != "reference"

    def paged_attention(
        self,
        q: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        steps: PagedSegments,
        *,
        scale: float,
        window: int | None = None,
        window_kind: WindowKind = "sliding",
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
        slopes_rounded: bool = False,
        slopes_factor: float = 1.0,
    ) -> Tensor:
        """Return (T, H, E): new tokens of sequences attend to keys in pages, their own included."""
        y: Tensor = self._run(
            "paged_attention",
            q,
            key_pages,
            value_pages,
            steps,
            scale=scale,
            window=window,
            window_kind=window_kind,
            soft_cap=soft_cap,
            sinks=sinks,
            slopes=slopes,
            slopes_rounded=slopes_rounded,
            slopes_factor=slopes_factor,
        )
        return y

    def latent_attention(
        self, q: Tensor, pages: Tensor, steps: PagedSegments, *, rank: int, scale: float
    ) -> Tensor:
        """Return (T, H, rank): q (T, H, R) attend to latents; their first `rank` are the values."""
        y: Tensor = self._run("latent_attention", q, pages, steps, rank=rank, scale=scale)
        return y

    def sample(
        self,
        logits: Tensor,
        *,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
        draws: bool = True,
        cuts: bool = True,
    ) -> Tensor:
        """Return a token of each row of logits (S, V); random by (seed, position) alone."""
        y: Tensor = self._run(
            "sample",
            logits,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seeds=seeds,
            positions=positions,
            draws=draws,
            cuts=cuts,
        )
        return y
