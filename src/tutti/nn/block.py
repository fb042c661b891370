"""One transformer block, as its `BlockSpec` declares it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.host.block import DenseBlock, compile_block
from tutti.models import Activation, BlockSpec, ModelSpec, Placement, Residual
from tutti.models.anatomy import block_norm_names
from tutti.nn.attention import Attention
from tutti.nn.batch import Batch
from tutti.nn.experts import Experts
from tutti.nn.latent import LatentAttention
from tutti.nn.linear import Linear
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
        self._joint: DenseBlock | None = None
        self.joins = make.operators.joins_blocks() and joint_block(self) is not None

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
        if self.joins:
            ran = self._ran_at_once(x, added, batch)
            if ran is not None:
                return ran
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

    def _ran_at_once(
        self, x: Tensor, added: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor] | None:
        """Return what the device made of the block in one pass, if it did."""
        attention, mlp = self.attention, self.mlp
        assert isinstance(attention, Attention)
        assert mlp is not None
        layers = (attention.qkv, attention.output, mlp.up, mlp.down)
        if self._joint is None or self._joint.qkv is not attention.qkv.weight:
            self._joint = joint_block(self)
        if self._joint is None or any(layer.adapted is not None for layer in layers):
            self.joins = self._joint is not None
            return None
        assert attention.table_index is not None
        assert batch.cache is not None
        table = batch.tables[attention.table_index]
        return batch.cache.run_block(attention.core.unit, x, added, self._joint, table)

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


# --- blocks that a device may run in one pass ------------------------------------------------


def joint_block(block: Block) -> DenseBlock | None:
    """Return a block's weights; None where it has parts that no device joins."""
    spec, attention, mlp = block.spec, block.attention, block.mlp
    if spec.residual is not Residual.SEQUENTIAL or spec.placement is not Placement.PRE:
        return None
    if not isinstance(attention, Attention) or mlp is None or block.moe is not None:
        return None
    own, rotary = attention.spec, attention.spec.rotary
    if rotary is None or own.alibi is not None or own.sinks or own.soft_cap is not None:
        return None
    if not mlp.gated or mlp.activation is not Activation.SILU or spec.residual_multiplier != 1.0:
        return None
    layers = (attention.qkv, attention.output, mlp.up, mlp.down)
    norms = (_weight(block.attention_norm), _weight(block.mlp_norm))
    if attention.qkv.parallel.tensor.size > 1 or not all(_is_plain(layer) for layer in layers):
        return None
    if norms[0] is None or norms[1] is None:
        return None
    normed = own.qk_norm
    heads = (attention.query_norm, attention.key_norm)
    head_norms = None
    if normed is not None:
        plain = normed.span == "head" and not normed.after_rotary and normed.norm.kind == "rms"
        alike = normed.norm.eps == spec.norm.eps
        alike = alike and normed.norm.unit_offset == spec.norm.unit_offset
        weights = [None if each is None else each.weight for each in heads]
        if not plain or not alike or weights[0] is None or weights[1] is None:
            return None
        head_norms = (weights[0], weights[1])
    return DenseBlock(
        norms=(norms[0], norms[1]),
        head_norms=head_norms,
        qkv=layers[0].weight,
        output=layers[1].weight,
        up=layers[2].weight,
        down=layers[3].weight,
        heads=attention.heads,
        eps=spec.norm.eps,
        unit_offset=spec.norm.unit_offset,
        interleaved=rotary.interleaved,
        scale=own.softmax_scale,
        window=own.window,
        window_kind=own.window_kind,
    )


def compile_joint_blocks(blocks: Sequence[Block]) -> None:
    """Let the device compile what its joined blocks run, before somebody waits for it."""
    for block in blocks:
        own = joint_block(block) if block.joins else None
        if own is not None:
            compile_block(own)
            return  # the others are of the same types


def _weight(norm: Norm) -> Tensor | None:
    return norm.weight if norm.spec.kind == "rms" and norm.bias is None else None


def _is_plain(layer: Linear) -> bool:
    """Tell whether a layer is a product with one tensor and nothing else."""
    weight: object = layer.weight
    return isinstance(weight, Tensor) and layer.bias is None and layer.low_rank is None
