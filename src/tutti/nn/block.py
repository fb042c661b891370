"""One transformer block, as its `BlockSpec` declares it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tutti.accelerator.gradients import WeightGradients
from tutti.models import BlockSpec, ModelSpec, Placement, Residual
from tutti.models.anatomy import block_norm_names
from tutti.nn.attention import Attention
from tutti.nn.batch import Batch
from tutti.nn.experts import Experts
from tutti.nn.latent import LatentAttention
from tutti.nn.mlp import Mlp
from tutti.nn.norm import Norm
from tutti.nn.storage import Holder, Maker


class Block(Holder):
    """Attention and a feed-forward layer, with norms and residuals around them."""

    attention_norm: Norm
    attention_post_norm: Norm
    mlp_norm: Norm
    mlp_post_norm: Norm

    def __init__(self, make: Maker, model: ModelSpec, spec: BlockSpec, unit: int) -> None:
        super().__init__()
        self.spec = spec
        kind = Attention if spec.attention.latent is None else LatentAttention
        self.attention: Attention | LatentAttention = kind(make, model, spec.attention, unit)
        self.mlp: Mlp | None = None
        self.moe: Experts | None = None
        if spec.mlp is not None:
            self.mlp = Mlp(make, "mlp", spec.mlp.activation, gated=spec.mlp.gated)
        if spec.moe is not None:
            self.moe = Experts(make, spec.moe)
        for name in block_norm_names(spec):
            self.add_module(name, Norm(make, name, spec.norm))

    def forward(
        self, x: Tensor, batch: Batch, later: WeightGradients | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream after the block, and the router's balancing loss if any."""
        if self.spec.residual is not Residual.SEQUENTIAL:
            return self._parallel(x, batch, later)
        match self.spec.placement:
            case Placement.PRE:
                return self._pre(x, batch, later)
            case Placement.SANDWICH:
                return self._sandwich(x, batch, later)
            case Placement.BRANCH:
                x = x + self.attention_post_norm(self._attend(x, batch, later))
                y, balance = self._feed_forward(x, batch, later)
                return x + self.mlp_post_norm(y), balance
            case Placement.POST:
                x, _ = self.attention_post_norm.after(self._attend(x, batch, later), x)
                y, balance = self._feed_forward(x, batch, later)
                return self.mlp_post_norm.after(y, x)[0], balance

    def following(
        self, x: Tensor, added: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """Return the stream and what is to be added to it; both are left to the next block's norm.

        `added` is what the block before left. For inference: no balancing loss is returned.
        """
        sequential = self.spec.residual is Residual.SEQUENTIAL
        if not sequential or self.spec.placement is not Placement.PRE:
            return self(x if added is None else x + added, batch)[0], None
        normed, x = self._normed(self.attention_norm, self.attention, x, added)
        y = self._scaled(self.attention(normed, batch, None))
        if self.mlp is None:
            normed, x = self.mlp_norm.after(y, x)
            return x, self._feed_forward(normed, batch, None)[0]
        normed, x = self._normed(self.mlp_norm, self.mlp, x, y)
        return x, self._scaled(self.mlp(normed, batch.num_tokens, None))

    def _normed(
        self, norm: Norm, reader: Attention | LatentAttention | Mlp, x: Tensor, added: Tensor | None
    ) -> tuple[Any, Tensor]:
        """Return the norm of the stream as its reader takes it best, and the stream."""
        if norm.spec.kind == "rms" and reader.takes_narrow:
            return norm.narrow(x, added)
        return norm.on_stream(x, added)

    def _pre(
        self, x: Tensor, batch: Batch, later: WeightGradients | None
    ) -> tuple[Tensor, Tensor | None]:
        normed, x = self.attention_norm.beside(x)
        y = self._attend(normed, batch, later)
        normed, x = self.mlp_norm.after(y, x)
        y, balance = self._feed_forward(normed, batch, later)
        return x + y, balance

    def _sandwich(
        self, x: Tensor, batch: Batch, later: WeightGradients | None
    ) -> tuple[Tensor, Tensor | None]:
        normed, x = self.attention_norm.beside(x)
        y = self.attention_post_norm(self._attend(normed, batch, later))
        normed, x = self.mlp_norm.after(y, x)
        y, balance = self._feed_forward(normed, batch, later)
        return x + self.mlp_post_norm(y), balance

    def _parallel(
        self, x: Tensor, batch: Batch, later: WeightGradients | None
    ) -> tuple[Tensor, Tensor | None]:
        normed = self.attention_norm(x)
        shared = self.spec.residual is Residual.PARALLEL_ONE_NORM
        attended = self._attend(normed, batch, later)
        y, balance = self._feed_forward(normed if shared else self.mlp_norm(x), batch, later)
        return x + attended + y, balance

    def _attend(self, x: Tensor, batch: Batch, later: WeightGradients | None) -> Tensor:
        return self._scaled(self.attention(x, batch, later))

    def _feed_forward(
        self, x: Tensor, batch: Batch, later: WeightGradients | None
    ) -> tuple[Tensor, Tensor | None]:
        if self.moe is not None:
            y, balance = self.moe(x, batch, later)
            return self._scaled(y), balance
        assert self.mlp is not None
        return self._scaled(self.mlp(x, batch.num_tokens, later)), None

    def _scaled(self, y: Tensor) -> Tensor:
        factor = self.spec.residual_multiplier
        return y if factor == 1.0 else y * factor
