"""Grouped-query attention: projections, norms on heads, rotary positions, and the core.

Queries, keys and values are one product. Sliced over tensor-parallel ranks by heads; key-value
heads are copied where there are fewer than ranks. `Core` is shared with latent attention.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.reference.narrow import NarrowRows
from tutti.models import AttentionSpec, ModelSpec
from tutti.nn.alibi import alibi_specs, slopes
from tutti.nn.batch import Batch
from tutti.nn.cache import HeadPlacing, Scores
from tutti.nn.linear import ColumnLinear, RowLinear
from tutti.nn.norm import HeadNorm
from tutti.nn.parallel.collectives import gather
from tutti.nn.parallel.ring import fits_ring, ring_attention
from tutti.nn.rotary import rotary_specs
from tutti.nn.storage import Holder, Maker
from tutti.plan.plan import ContextKind


class Core(Holder):
    """The attention itself, with what the model adds to its scores."""

    sinks: Tensor | None

    def __init__(self, make: Maker, model: ModelSpec, spec: AttentionSpec, unit: int) -> None:
        super().__init__()
        self.operators, self.parallel, self.spec = make.operators, make.parallel, spec
        self.unit = unit
        self.hold("sinks", make, "attention.sinks")
        group = make.parallel.tensor
        self.heads = spec.heads // group.size
        self.first_head = self.heads * group.rank
        self.ring = make.context_kind is ContextKind.RING and fits_ring(spec)
        self._slopes: Tensor | None = None
        self.bias_index: int | None = None
        if spec.alibi is not None:
            own = (spec.alibi, spec.heads, spec.softmax_scale)
            self.bias_index = alibi_specs(model).index(own)

    def forward(self, q_thd: Tensor, k_tgd: Tensor, v_tge: Tensor, batch: Batch) -> Tensor:
        """Return (T, H·E)."""
        if batch.cache is not None:
            scores = self.scores(q_thd.device)
            return batch.cache.attend(self.unit, q_thd, k_tgd, v_tge, scores).flatten(1)
        if self.ring and batch.key_order is not None:
            return self._around(q_thd, k_tgd, v_tge, batch)
        if batch.key_order is not None:
            k_tgd, v_tge = self._of_all_ranks(k_tgd, v_tge, batch, batch.key_order)
        bias_hs = None
        if self.bias_index is not None:
            whole = batch.key_biases[self.bias_index]
            bias_hs = whole[self.first_head : self.first_head + self.heads]
        spec = self.spec
        y_the = self.operators.attention(
            q_thd,
            k_tgd,
            v_tge,
            batch.segments,
            scale=spec.softmax_scale,
            window=spec.window,
            window_kind=spec.window_kind,
            soft_cap=spec.soft_cap,
            sinks=self.sinks,
            key_bias=bias_hs,
        )
        return y_the.flatten(1)

    def scores(self, device: torch.device) -> Scores:
        """Return what happens to the scores, for a cache that attends."""
        spec = self.spec
        if self._slopes is None and spec.alibi is not None:
            own = slopes(spec.heads)[self.first_head : self.first_head + self.heads]
            self._slopes = own.to(device)
        return Scores(
            scale=spec.softmax_scale,
            window=spec.window,
            window_kind=spec.window_kind,
            soft_cap=spec.soft_cap,
            sinks=self.sinks,
            slopes=self._slopes,
            slopes_rounded=spec.alibi is not None and spec.alibi.bfloat16,
            slopes_factor=spec.softmax_scale if spec.alibi and spec.alibi.scaled else 1.0,
        )

    def _around(self, q_thd: Tensor, k_tgd: Tensor, v_tge: Tensor, batch: Batch) -> Tensor:
        """Let the keys and values pass through all ranks."""
        return ring_attention(
            q_thd,
            k_tgd,
            v_tge,
            batch.ring,
            batch.key_rows,
            scale=self.spec.softmax_scale,
            group=self.parallel.context,
            operators=self.operators,
        ).flatten(1)

    def _of_all_ranks(
        self, k_tgd: Tensor, v_tge: Tensor, batch: Batch, order: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values of whole sequences, in one collective."""
        widths = [k_tgd.shape[1] * k_tgd.shape[2], v_tge.shape[1] * v_tge.shape[2]]
        both = torch.cat((k_tgd.flatten(1), v_tge.flatten(1)), dim=1)
        both = gather(both, self.parallel.context, batch.key_rows)[order]
        k, v = both.split(widths, dim=1)
        return k.unflatten(1, k_tgd.shape[1:]), v.unflatten(1, v_tge.shape[1:])


class Attention(Holder):
    """Multi-head or grouped-query attention."""

    def __init__(self, make: Maker, model: ModelSpec, spec: AttentionSpec, unit: int) -> None:
        super().__init__()
        self.operators, self.spec = make.operators, spec
        names = ("attention.query", "attention.key", "attention.value")
        self.qkv = ColumnLinear(make, *names)
        self.heads, self.kv_heads = (width // spec.head_dim for width in self.qkv.widths[:2])
        self.query_norm = self.key_norm = None
        if spec.qk_norm is not None:
            self.query_norm = HeadNorm(make, "attention.query_norm", spec.qk_norm, spec.heads)
            self.key_norm = HeadNorm(make, "attention.key_norm", spec.qk_norm, spec.kv_heads)
        self.core = Core(make, model, spec, unit)
        self.output = RowLinear(make, "attention.output")
        self.table_index = None if spec.rotary is None else rotary_specs(model).index(spec.rotary)

    @property
    def takes_narrow(self) -> bool:
        """Whether its rows may come in 8 bits."""
        return self.qkv.takes_narrow

    def forward(
        self, x: Tensor | NarrowRows, batch: Batch, later: WeightGradients | None = None
    ) -> Tensor:
        """Return the attention's output, of this rank's tokens."""
        heads = self.qkv(x, batch.num_tokens, later).unflatten(-1, (-1, self.spec.head_dim))
        if batch.cache is not None and (placing := self._placing(batch)) is not None:
            scores = self.core.scores(heads.device)
            y_the = batch.cache.attend_heads(self.core.unit, heads, placing, scores)
            if y_the is not None:
                return self._output(y_the.flatten(1), later)
        q_thd, k_tgd, v_tgd = self._placed(heads, batch)
        return self._output(self.core(q_thd, k_tgd, v_tgd, batch), later)

    def _output(self, heads: Tensor, later: WeightGradients | None) -> Tensor:
        y: Tensor = self.output(heads, later)
        return y

    def _placing(self, batch: Batch) -> HeadPlacing | None:
        """Return what a cache may do to heads in one pass; None: it is something else."""
        norm, rotary = self.spec.qk_norm, self.spec.rotary
        if rotary is None or self.table_index is None:
            return None
        cos, sin = batch.tables[self.table_index]
        turned = HeadPlacing(
            heads=self.heads,
            kv_heads=self.kv_heads,
            cos=cos,
            sin=sin,
            interleaved=rotary.interleaved,
        )
        if norm is None:
            return turned
        assert self.query_norm is not None
        assert self.key_norm is not None
        weights = (self.query_norm.weight, self.key_norm.weight)
        plain = norm.span == "head" and norm.norm.kind == "rms" and not norm.after_rotary
        if not plain or any(weight is None for weight in weights):
            return None
        return replace(
            turned,
            query_norm=weights[0],
            key_norm=weights[1],
            eps=norm.norm.eps,
            unit_offset=norm.norm.unit_offset,
        )

    def _placed(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys, normed and rotated, and values."""
        norm, rotary = self.spec.qk_norm, self.spec.rotary
        if (placing := self._placing(batch)) is not None:
            return self.operators.split_rotary(x, placing.cos, placing.sin, **placing.options())
        if norm is None and rotary is None:
            q_thd, k_tgd, v_tgd = x.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
            return q_thd, k_tgd, v_tgd
        both, v_tgd = x.split([self.heads + self.kv_heads, self.kv_heads], dim=1)
        if norm is not None and not norm.after_rotary:
            both = self._normed(both)
        if rotary is not None and self.table_index is not None:
            cos, sin = batch.tables[self.table_index]
            both = self.operators.rotary(both, cos, sin, interleaved=rotary.interleaved)
        if norm is not None and norm.after_rotary:
            both = self._normed(both)
        return *both.split([self.heads, self.kv_heads], dim=1), v_tgd

    def _normed(self, both: Tensor) -> Tensor:
        assert self.query_norm is not None
        assert self.key_norm is not None
        q_thd, k_tgd = both.split([self.heads, self.kv_heads], dim=1)
        return torch.cat((self.query_norm(q_thd), self.key_norm(k_tgd)), dim=1)
