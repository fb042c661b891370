"""Multi-latent attention: queries, keys and values through low-rank latents.

The down projections see a rank's own tokens and are whole on every tensor-parallel rank; the
latents, which are narrow, are what travels; the up projections are sliced by heads. One rotated
part of the key is shared by all heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.products import product
from tutti.models import AttentionSpec, LatentSpec, ModelSpec, NormSpec
from tutti.nn.attention import Core
from tutti.nn.batch import Batch
from tutti.nn.cache import Cache
from tutti.nn.linear import Linear, RowLinear
from tutti.nn.norm import Norm
from tutti.nn.parallel.collectives import enter
from tutti.nn.parallel.overlap import Beside, Layer, column_products
from tutti.nn.rotary import rotary_specs
from tutti.nn.storage import Holder, Maker


class LatentAttention(Holder):
    """Attention whose keys and values are made of one latent."""

    takes_narrow = False  # its rows have two readers

    def __init__(self, make: Maker, model: ModelSpec, spec: AttentionSpec, unit: int) -> None:
        super().__init__()
        if spec.latent is None or spec.rotary is None:
            raise ValueError("latent attention needs 'latent' and 'rotary'")
        self.operators, self.parallel, self.spec = make.operators, make.parallel, spec
        self.latent: LatentSpec = spec.latent
        self.interleaved = spec.rotary.interleaved
        self.table_index = rotary_specs(model).index(spec.rotary)
        norm = NormSpec(eps=self.latent.norm_eps)
        self.direct = self.latent.query_rank is None
        if self.direct:
            self.query = Linear(make, "attention.query")
            self.down = Linear(make, "attention.kv_down")
        else:
            self.down = Linear(make, "attention.query_down", "attention.kv_down")
            self.query_norm = Norm(make, "attention.query_latent_norm", norm)
            self.query = Linear(make, "attention.query_up")
        self.kv_norm = Norm(make, "attention.kv_latent_norm", norm)
        self.kv_up = Linear(make, "attention.kv_up")
        # beside a cache it is multiplied into the queries
        self.kv_up.quantisable, self.kv_up.adaptable = (), False
        self.core = Core(make, model, spec, unit)
        self.output = RowLinear(make, "attention.output")

    def forward(self, x: Tensor, batch: Batch, later: WeightGradients | None = None) -> Tensor:
        """Return the attention's output, of this rank's tokens."""
        rope, rank = self.latent.rope_dim, self.latent.kv_rank
        *before, kv, key_rope = self.down(x, later).split(
            [*self.down.widths[:-1], rank, rope], dim=-1
        )
        source = x if self.direct else self.query_norm(before[0])
        parts = (source, self.kv_norm(kv), key_rope)
        if batch.cache is not None:
            return self._cached(parts, batch, batch.cache)
        q, kv, key_rope = self._widened(parts, batch.num_tokens, later)
        cos, sin = batch.tables[self.table_index]
        q_thd = q.unflatten(-1, (-1, self.spec.head_dim))
        q_nope, q_rope = q_thd.split([self.latent.nope_dim, rope], dim=-1)
        q_rope = self.operators.rotary(q_rope, cos, sin, interleaved=self.interleaved)
        k_rope = self.operators.rotary(
            key_rope.unsqueeze(1), cos, sin, interleaved=self.interleaved
        )
        both = kv.unflatten(-1, (q_thd.shape[1], -1))
        k_nope, v_the = both.split([self.latent.nope_dim, self.latent.value_dim], dim=-1)
        k_rope = k_rope.expand(-1, q_thd.shape[1], -1)
        q_thd, k_thd = torch.cat((q_nope, q_rope), dim=-1), torch.cat((k_nope, k_rope), dim=-1)
        y: Tensor = self.output(self.core(q_thd, k_thd, v_the, batch), later)
        return y

    def _cached(self, parts: tuple[Tensor, Tensor, Tensor], batch: Batch, cache: Cache) -> Tensor:
        """Attend to latents: what makes keys of them goes into the queries, values come after."""
        widths = [part.shape[-1] for part in parts]
        joined = enter(torch.cat(parts, dim=-1), self.parallel, batch.num_tokens)
        source, kv, key_rope = joined.split(widths, dim=-1)
        cos, sin = batch.tables[self.table_index]
        q_thd = self.query(source).unflatten(-1, (-1, self.spec.head_dim))
        q_nope, q_rope = q_thd.split([self.latent.nope_dim, self.latent.rope_dim], dim=-1)
        q_rope = self.operators.rotary(q_rope, cos, sin, interleaved=self.interleaved)
        k_rope = self.operators.rotary(
            key_rope.unsqueeze(1), cos, sin, interleaved=self.interleaved
        )
        up_hnr = self.kv_up.weight.unflatten(0, (q_thd.shape[1], -1))
        key_hnr, value_her = up_hnr.split([self.latent.nope_dim, self.latent.value_dim], dim=1)
        q_thr = product(q_nope.transpose(0, 1), key_hnr).transpose(0, 1)
        y_thr = cache.attend_latents(
            self.core.unit,
            torch.cat((q_thr, q_rope), dim=-1),
            torch.cat((kv, k_rope.squeeze(1)), dim=-1),
            rank=self.latent.kv_rank,
            scale=self.spec.softmax_scale,
        )
        y_the = product(y_thr.transpose(0, 1), value_her.transpose(1, 2)).transpose(0, 1)
        y: Tensor = self.output(y_the.flatten(1))
        return y

    def _widened(
        self, parts: tuple[Tensor, Tensor, Tensor], num_tokens: int, later: WeightGradients | None
    ) -> tuple[Tensor, ...]:
        """Return queries, keys with values, and the keys' rotated part, of all tokens.

        What they are made of travels as one.
        """
        parallel = self.parallel
        if parallel.tensor.size == 1:
            return self.query(parts[0], later), self.kv_up(parts[1], later), parts[2]
        joined = torch.cat(parts, dim=-1)
        if parallel.overlap_chunks > 1:
            beside = Beside.of(parallel, self.operators, num_tokens, later)
            layers = (self.query.layer, self.kv_up.layer, Layer(parts[2].shape[-1]))
            return column_products(joined, layers, beside)
        widths = [part.shape[-1] for part in parts]
        source, kv, key_rope = enter(joined, parallel, num_tokens).split(widths, dim=-1)
        return self.query(source, later), self.kv_up(kv, later), key_rope
