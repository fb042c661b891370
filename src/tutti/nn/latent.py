"""Multi-latent attention: queries, keys and values through low-rank latents.

The down projections see a rank's own tokens and are whole on every tensor-parallel rank; the
latents, which are narrow, are what travels; the up projections are sliced by heads. One rotated
part of the key is shared by all heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tutti.accelerator.gradients import WeightGradients
from tutti.models import AttentionSpec, LatentSpec, ModelSpec, NormSpec
from tutti.nn.attention import Core
from tutti.nn.batch import Batch
from tutti.nn.collectives import enter
from tutti.nn.linear import Linear, RowLinear
from tutti.nn.norm import Norm
from tutti.nn.parallel import ParallelContext
from tutti.nn.rotary import rotary_specs
from tutti.nn.storage import Holder, Maker


class LatentAttention(Holder):
    """Attention whose keys and values are made of one latent."""

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
            self.query = Linear(make, "attention.query", sees="all")
            self.down = Linear(make, "attention.kv_down")
        else:
            self.down = Linear(make, "attention.query_down", "attention.kv_down")
            self.query_norm = Norm(make, "attention.query_latent_norm", norm)
            self.query = Linear(make, "attention.query_up", sees="all")
        self.kv_norm = Norm(make, "attention.kv_latent_norm", norm)
        self.kv_up = Linear(make, "attention.kv_up", sees="all")
        self.core = Core(make, model, spec, unit)
        self.output = RowLinear(make, "attention.output")

    def forward(self, x: Tensor, batch: Batch, later: WeightGradients | None = None) -> Tensor:
        """Return the attention's output, of this rank's tokens."""
        rope, rank = self.latent.rope_dim, self.latent.kv_rank
        *before, kv, key_rope = self.down(x, later).split(
            [*self.down.widths[:-1], rank, rope], dim=-1
        )
        source = x if self.direct else self.query_norm(before[0])
        source, kv, key_rope = _enter_all(
            (source, self.kv_norm(kv), key_rope), self.parallel, batch.num_tokens
        )
        cos, sin = batch.tables[self.table_index]
        q_thd = self.query(source, later).unflatten(-1, (-1, self.spec.head_dim))
        q_nope, q_rope = q_thd.split([self.latent.nope_dim, rope], dim=-1)
        q_rope = self.operators.rotary(q_rope, cos, sin, interleaved=self.interleaved)
        k_rope = self.operators.rotary(
            key_rope.unsqueeze(1), cos, sin, interleaved=self.interleaved
        )
        both = self.kv_up(kv, later).unflatten(-1, (q_thd.shape[1], -1))
        k_nope, v_the = both.split([self.latent.nope_dim, self.latent.value_dim], dim=-1)
        k_rope = k_rope.expand(-1, q_thd.shape[1], -1)
        q_thd, k_thd = torch.cat((q_nope, q_rope), dim=-1), torch.cat((k_nope, k_rope), dim=-1)
        y: Tensor = self.output(self.core(q_thd, k_thd, v_the, batch), later)
        return y


def _enter_all(
    parts: Sequence[Tensor], parallel: ParallelContext, num_tokens: int
) -> Sequence[Tensor]:
    """Return all tokens of several tensors, in one collective."""
    if parallel.tensor.size == 1:
        return parts
    widths = [part.shape[-1] for part in parts]
    joined = enter(torch.cat(tuple(parts), dim=-1), parallel, num_tokens)
    return tuple(joined.split(widths, dim=-1))
