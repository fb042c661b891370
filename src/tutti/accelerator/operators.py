"""`Operators`: what a device can compute, as typed functions.

This class is the whole vocabulary between models and chips. Each method picks the implementation:
the one named by the user (`TUTTI_OPERATORS=rms_norm=reference`), else the one measured fastest for
this dtype and size, else the highest ranked; of these the first that supports the call.

Shapes: T tokens, C model width, H heads, G key-value heads, D head width, F feed-forward width,
V vocabulary, E experts, K experts per token.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tutti.accelerator import (  # noqa: F401  (they register themselves)
    scaled_dot_product,
    torch_operators,
)
from tutti.accelerator.choices import Choices
from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.inference import Inference
from tutti.accelerator.quantised import QuantisedWeight
from tutti.accelerator.reference.attention import WindowKind
from tutti.accelerator.reference.experts import Permutation, Routing
from tutti.accelerator.reference.loss import Vocabulary
from tutti.accelerator.reference.narrow import NarrowRows
from tutti.accelerator.reference.optimizer import AdamSettings
from tutti.accelerator.registry import (
    OVERRIDE,
    Implementation,
    implementations,
    operator_names,
    overrides,
    usual,
)
from tutti.accelerator.segments import Segments
from tutti.errors import InputError, hint
from tutti.models.parts import Activation, RouterSpec


class Operators(Inference):
    """The operators of one type of device."""

    def __init__(
        self,
        device_type: str,
        *,
        choices: Choices | None = None,
        forced: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.device_type = device_type
        self.choices = choices or Choices()
        self._candidates = {name: usual(name, device_type) for name in operator_names()}
        if forced is None:
            forced = overrides(os.environ.get(OVERRIDE, ""))
        self.forced = dict(forced)
        for operator, name in self.forced.items():
            self._force(operator, name)

    def _force(self, operator: str, name: str) -> None:
        known = {i.name: i for i in implementations(operator, self.device_type)}
        if name not in known:
            raise InputError(
                f"operator '{operator}' on {self.device_type}: '{name}'; {hint(name, known)}"
            )
        self._candidates[operator] = [known[name]]

    def preferred(self, operator: str) -> tuple[str, str]:
        """Return the implementation tried first, and why: forced, measured or ranked."""
        if operator in self.forced:
            return self.forced[operator], "forced"
        present = [i.name for i in self._candidates[operator]]
        measured = [name for name in self.choices.names(operator) if name in present]
        if measured:
            return " or ".join(measured), "measured"
        return present[0], "ranked" if len(present) > 1 else "the only one"

    def chosen(self, operator: str, *args: Any, **options: Any) -> Implementation:
        """Return the implementation that a call would run."""
        candidates = self._candidates[operator]
        # While torch.compile traces, the table would be read once per graph and break it.
        if len(candidates) > 1 and not torch.compiler.is_compiling():
            first = self.choices.best(operator, args)
            if first is not None:
                candidates = sorted(candidates, key=lambda i: (not i.infers, i.name != first))
        reasons = []
        for candidate in candidates:
            reason = candidate.supports(*args, **options)
            if reason is None:
                return candidate
            reasons.append(f"{candidate.name}: {reason}")
        raise InputError(
            f"operator '{operator}' on {self.device_type} has no implementation for this call: "
            + "; ".join(reasons)
        )

    def _run(self, operator: str, *args: Any, **options: Any) -> Any:
        return self.chosen(operator, *args, **options).function(*args, **options)

    def _run_fused(self, operator: str, *args: Any, **options: Any) -> Any | None:
        """Run what joins several operators; None: run them, one of them may be a device's own."""
        chosen = self.chosen(operator, *args, **options)
        return None if chosen.name == "reference" else chosen.function(*args, **options)

    # --- products and tables ---------------------------------------------------------------

    def linear(
        self,
        x: Tensor | NarrowRows,
        weight: Tensor | QuantisedWeight,
        bias: Tensor | None = None,
        *,
        later: WeightGradients | None = None,
        may_narrow: bool = False,
    ) -> Tensor:
        """Return x·Wᵀ + b, W (out, in); with `later`, the weight's gradient is left there."""
        if isinstance(weight, QuantisedWeight):
            return self.quantised_linear(x, weight, bias)
        assert isinstance(x, Tensor)
        narrow = may_narrow and self.narrows("narrow_linear", x, weight, bias)
        y: Tensor = self._run("narrow_linear" if narrow else "linear", x, weight, bias, later=later)
        return y

    def narrow_linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        later: WeightGradients | None = None,
    ) -> Tensor:
        """Return x·Wᵀ + b of products in 8 bits, each row scaled by a power of two."""
        y: Tensor = self._run("narrow_linear", x, weight, bias, later=later)
        return y

    def grouped_linear(
        self,
        x: Tensor,
        weight: Tensor | QuantisedWeight,
        counts: Tensor,
        bias: Tensor | None = None,
        *,
        later: WeightGradients | None = None,
        may_narrow: bool = False,
    ) -> Tensor:
        """Return runs of `counts[e]` rows times expert e's weight: x (T, in), W (E, out, in)."""
        if isinstance(weight, QuantisedWeight):
            return self.quantised_grouped_linear(x, weight, counts, bias)
        narrow = may_narrow and self.narrows("narrow_grouped_linear", x, weight, counts, bias)
        kind = "narrow_grouped_linear" if narrow else "grouped_linear"
        y: Tensor = self._run(kind, x, weight, counts, bias, later=later)
        return y

    def narrow_grouped_linear(
        self,
        x: Tensor,
        weight: Tensor,
        counts: Tensor,
        bias: Tensor | None = None,
        *,
        later: WeightGradients | None = None,
    ) -> Tensor:
        """Return grouped products in 8 bits, each row scaled by a power of two."""
        y: Tensor = self._run("narrow_grouped_linear", x, weight, counts, bias, later=later)
        return y

    def embedding(
        self, tokens: Tensor, table: Tensor, *, later: WeightGradients | None = None
    ) -> Tensor:
        """Return the table's rows that the tokens name; zeros for a negative token."""
        y: Tensor = self._run("embedding", tokens, table, later=later)
        return y

    # --- norms -----------------------------------------------------------------------------

    def rms_norm(
        self, x: Tensor, weight: Tensor | None, *, eps: float, unit_offset: bool = False
    ) -> Tensor:
        """Return x ÷ rms(x) · weight, or · (1 + weight)."""
        y: Tensor = self._run("rms_norm", x, weight, eps=eps, unit_offset=unit_offset)
        return y

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float
    ) -> Tensor:
        """Return (x − mean) ÷ deviation · weight + bias."""
        y: Tensor = self._run("layer_norm", x, weight, bias, eps=eps)
        return y

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        *,
        eps: float,
        unit_offset: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and the sum.

        Without a residual the sum is x. Who goes on with it instead of x lets the norm's backward
        pass add the two gradients.
        """
        run = self._run if residual is not None else self._run_fused
        both: tuple[Tensor, Tensor] | None = run(
            "add_rms_norm", x, residual, weight, eps=eps, unit_offset=unit_offset
        )
        if both is None:
            return self.rms_norm(x, weight, eps=eps, unit_offset=unit_offset), x
        return both

    def add_layer_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        *,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and the sum; without a residual as `add_rms_norm`."""
        run = self._run if residual is not None else self._run_fused
        both: tuple[Tensor, Tensor] | None = run(
            "add_layer_norm", x, residual, weight, bias, eps=eps
        )
        return both or (self.layer_norm(x, weight, bias, eps=eps), x)

    # --- positions and activations ---------------------------------------------------------

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
        """Rotate the first dimensions of each head: x (T, H, D), cos and sin (T, d/2)."""
        y: Tensor = self._run("rotary", x, cos, sin, interleaved=interleaved)
        return y

    def split_rotary(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        heads: int,
        kv_heads: int,
        interleaved: bool = False,
        query_norm: Tensor | None = None,
        key_norm: Tensor | None = None,
        eps: float = 0.0,
        unit_offset: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys, normed and rotated, and values of x (T, H + 2·G, D)."""
        placed: tuple[Tensor, Tensor, Tensor] | None = self._run_fused(
            "split_rotary", x, cos, sin, heads=heads, kv_heads=kv_heads, interleaved=interleaved,
            query_norm=query_norm, key_norm=key_norm, eps=eps, unit_offset=unit_offset,
        )  # fmt: skip
        if placed is not None:
            return placed
        both, v = x.split([heads + kv_heads, kv_heads], dim=1)
        if query_norm is not None or key_norm is not None:
            parts = zip(both.split([heads, kv_heads], dim=1), (query_norm, key_norm), strict=True)
            options: dict[str, Any] = {"eps": eps, "unit_offset": unit_offset}
            normed = (y if w is None else self.rms_norm(y, w, **options) for y, w in parts)
            both = torch.cat(tuple(normed), dim=1)
        turned = self.rotary(both, cos, sin, interleaved=interleaved)
        return *turned.split([heads, kv_heads], dim=1), v

    def activation(self, x: Tensor, *, kind: Activation) -> Tensor:
        """Return the non-linearity of each element."""
        y: Tensor = self._run("activation", x, kind=kind)
        return y

    def gated_activation(
        self, x: Tensor, *, kind: Activation, alpha: float = 1.702, limit: float = 7.0
    ) -> Tensor:
        """Return act(gate) · up of x (T, 2·F), gate first."""
        y: Tensor = self._run("gated_activation", x, kind=kind, alpha=alpha, limit=limit)
        return y

    # --- attention -------------------------------------------------------------------------

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        segments: Segments,
        *,
        scale: float,
        causal: bool = True,
        window: int | None = None,
        window_kind: WindowKind = "sliding",
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        key_bias: Tensor | None = None,
    ) -> Tensor:
        """Return (T, H, E) of q (T, H, D), k (S, G, D), v (S, G, E) within the segments."""
        y: Tensor = self._run(
            "attention", q, k, v, segments, scale=scale, causal=causal, window=window,
            window_kind=window_kind, soft_cap=soft_cap, sinks=sinks, key_bias=key_bias,
        )  # fmt: skip
        return y

    def attention_with_lse(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        segments: Segments,
        *,
        scale: float,
        causal: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Return attention over a part of the keys, and its log-sum-exp (T, H)."""
        both: tuple[Tensor, Tensor] = self._run(
            "attention_with_lse", q, k, v, segments, scale=scale, causal=causal
        )
        return both

    # --- the head --------------------------------------------------------------------------

    def linear_cross_entropy(
        self,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        bias: Tensor | None = None,
        token_weights: Tensor | None = None,
        divisor: float = 1.0,
        soft_cap: float | None = None,
        vocabulary: Vocabulary | None = None,
        gradient_scale: float = 1.0,
        starts_backward: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return Σ weight·loss and each token's loss, x (T, C), W (V, C), without all logits.

        Backward must come with a gradient of `gradient_scale` where `starts_backward` is set.
        """
        both: tuple[Tensor, Tensor] = self._run(
            "linear_cross_entropy", x, weight, targets, bias=bias, token_weights=token_weights,
            divisor=divisor, soft_cap=soft_cap, vocabulary=vocabulary,
            gradient_scale=gradient_scale, starts_backward=starts_backward,
        )  # fmt: skip
        return both

    # --- experts ---------------------------------------------------------------------------

    def route(
        self, logits: Tensor, router: RouterSpec, top: int, correction: Tensor | None = None
    ) -> Routing:
        """Return each token's experts and their weights, from logits (T, E)."""
        routing: Routing = self._run("route", logits, router, top, correction)
        return routing

    def permute(self, x: Tensor, experts: Tensor, num_experts: int) -> Permutation:
        """Return a copy of each token for each of its experts (T, K), sorted by expert."""
        permutation: Permutation = self._run("permute", x, experts, num_experts)
        return permutation

    def unpermute(self, rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
        """Return each token's weighted sum of its experts' rows."""
        y: Tensor = self._run("unpermute", rows, order, weights)
        return y

    # --- optimizer -------------------------------------------------------------------------

    def adamw(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        means: Sequence[Tensor],
        squares: Sequence[Tensor],
        *,
        step: int,
        settings: AdamSettings,
        gradient_factor: Tensor | None = None,
        copies: Sequence[Tensor] | None = None,
    ) -> None:
        """Move the weights by one step, in place; not at all if the factor is not a number."""
        self._run(
            "adamw",
            weights,
            gradients,
            means,
            squares,
            step=step,
            settings=settings,
            gradient_factor=gradient_factor,
            copies=copies,
        )

    def squared_norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the sum of squares of all elements."""
        y: Tensor = self._run("squared_norm", tensors)
        return y
