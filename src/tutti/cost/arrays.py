"""What is priced, as arrays: model shapes, strategies and machines.

Every field is a float64 array; the fields of all three classes broadcast against each other, so
that one model on one machine (0-d arrays) meets a million strategies (1-d arrays). Flags are 0 or
1. Plans and clusters are reduced to these numbers here; nothing is priced here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tutti.hardware.chip import Dtype
from tutti.hardware.cluster import Cluster
from tutti.hardware.leaves import group_of, spanning_tier
from tutti.hardware.pool import Pool
from tutti.models.anatomy import BlockWidths
from tutti.models.flops import matmul_parameters
from tutti.models.spec import ModelSpec

FloatArray = npt.NDArray[np.float64]
Number = float | npt.NDArray[np.float64]

# Fused attention of these vendors pads unequal head dimensions to the larger one (CANN).
_PADS_HEADS = frozenset({"Huawei"})
# Formats that are priced as a speed-up over the 16-bit peak, for only products run in them.
_NARROW = frozenset({Dtype.FP8, Dtype.FP4, Dtype.INT8})


def _zero() -> FloatArray:
    return np.asarray(0.0)


def _teacher_share(spec: ModelSpec) -> float:
    """Return the forward work of a teacher beside the head, in products of its logits."""
    if spec.teacher is None:
        return 0.0
    return matmul_parameters(spec.teacher) / (spec.vocab * spec.hidden)


def _one() -> FloatArray:
    return np.asarray(1.0)


def _two() -> FloatArray:
    return np.asarray(2.0)


def _eight() -> FloatArray:
    return np.asarray(8.0)


def _unlimited() -> FloatArray:
    return np.asarray(np.inf)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrays:
    """Common to the three: numbers become arrays, rows can be taken."""

    @classmethod
    def filled(cls, **values: Number) -> Self:
        """Build from numbers and arrays; what is left out has its default."""
        return cls(**{name: np.asarray(v, dtype=np.float64) for name, v in values.items()})

    def take(self, index: Any) -> Self:
        """Return the rows at `index`; what is the same for all rows stays as it is."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return type(self)(**{n: v if v.ndim == 0 else v[index] for n, v in values.items()})

    @property
    def size(self) -> int:
        """How many rows the arrays describe together."""
        return int(np.broadcast(*(getattr(self, f.name) for f in fields(self)[:32])).size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shape(Arrays):
    """A decoder model: blocks with a dense feed-forward layer, and blocks with experts."""

    layers: FloatArray = field(default_factory=_one)
    moe_layers: FloatArray = field(
        default_factory=_zero
    )  # of them with experts; the dense ones come first
    hidden: FloatArray
    heads: FloatArray
    kv_heads: FloatArray
    d_qk: FloatArray  # of a query or key head
    d_v: FloatArray
    ffn: FloatArray  # width of the dense feed-forward layer
    gated: FloatArray = field(default_factory=_one)
    vocab: FloatArray  # as parameters and logits are held; padded
    head_vocab: FloatArray  # what the head's product runs on
    tied: FloatArray = field(default_factory=_zero)
    experts: FloatArray = field(default_factory=_zero)
    topk: FloatArray = field(default_factory=_zero)
    expert_ffn: FloatArray = field(default_factory=_zero)
    shared_ffn: FloatArray = field(default_factory=_zero)
    q_lora: FloatArray = field(default_factory=_zero)  # ranks of latent attention; 0: none
    kv_lora: FloatArray = field(default_factory=_zero)
    rope_dim: FloatArray = field(default_factory=_zero)
    dropout: FloatArray = field(default_factory=_zero)
    # forward work beside the product of logits, in such products: of answers, by a teacher
    answers: FloatArray = field(default_factory=_zero)
    window: FloatArray = field(
        default_factory=_unlimited
    )  # positions that a token attends to at most

    @classmethod
    def of(cls, spec: ModelSpec, block_index: int) -> Shape:
        """Return the shape of one of a model's distinct blocks, as 0-d arrays.

        Where the block has experts, the dense width is that of the model's first dense block,
        and the other way round.
        """
        block = spec.blocks[block_index]
        every = [BlockWidths.of(one, spec.hidden) for one in spec.blocks]
        own = every[block_index]
        dense = own if own.ffn else next((one for one in every if one.ffn), own)
        routed = own if own.experts else next((one for one in every if one.experts), own)
        names = ("experts", "topk", "expert_ffn", "shared_ffn")
        widths = own._replace(ffn=dense.ffn, **{name: getattr(routed, name) for name in names})
        return cls.filled(
            **widths._asdict(),
            layers=spec.num_layers,
            moe_layers=sum(spec.blocks[i].moe is not None for i in spec.layer_blocks),
            vocab=spec.vocab,
            head_vocab=1 if spec.head.scores else spec.vocab,
            tied=float(spec.head.tied),
            dropout=float(spec.dropout.residual > 0),
            answers=float(spec.answers) + _teacher_share(spec),
            window=np.inf if block.attention.window is None else block.attention.window,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strategy(Arrays):
    """How the model is trained: degrees, micro-batches, what is recomputed, kernels, formats."""

    sequence_length: FloatArray
    sequences: FloatArray = field(default_factory=_one)  # of one micro-batch on one replica
    micro_batches: FloatArray = field(default_factory=_one)  # per replica and step
    tp: FloatArray = field(default_factory=_one)
    cp: FloatArray = field(default_factory=_one)
    ep: FloatArray = field(default_factory=_one)
    pp: FloatArray = field(default_factory=_one)
    vpp: FloatArray = field(default_factory=_one)  # model chunks per stage, when interleaved
    dp: FloatArray = field(default_factory=_one)
    num_chips: FloatArray = field(default_factory=_one)
    sequence_parallel: FloatArray = field(default_factory=_zero)
    # Shares of the forward pass that run again: products, attention, element-wise, collectives.
    recompute_gemm: FloatArray = field(default_factory=_zero)
    recompute_attention: FloatArray = field(default_factory=_zero)
    recompute_elementwise: FloatArray = field(default_factory=_zero)
    recompute_network: FloatArray = field(default_factory=_zero)
    flash: FloatArray = field(default_factory=_one)
    shard: FloatArray = field(
        default_factory=_zero
    )  # 0: nothing, 1: optimizer states, 3: parameters
    grad_bytes: FloatArray = field(default_factory=_two)  # per gradient element that travels
    param_comm_bytes: FloatArray = field(default_factory=_two)  # per parameter that is gathered
    fp8: FloatArray = field(default_factory=_zero)  # 1: FP8 products, 2: FP4 products
    fp8_rowwise: FloatArray = field(default_factory=_zero)
    compiled: FloatArray = field(default_factory=_zero)
    async_tp: FloatArray = field(default_factory=_zero)
    overlap_chunks: FloatArray = field(default_factory=_one)  # pieces of a tensor-parallel product
    shared_beside: FloatArray = field(
        default_factory=_zero
    )  # shared experts are computed while the rows of the others travel
    context_gather: FloatArray = field(default_factory=_zero)  # keys and values at once, no ring
    once_per_node: FloatArray = field(
        default_factory=_zero
    )  # a token goes to a node once, and from there to its experts

    @property
    def tokens(self) -> FloatArray:
        """Tokens that one rank computes per micro-batch."""
        return self.sequences * self.sequence_length / self.cp


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Machine(Arrays):
    """A chip and the links around it. Bandwidths are bytes per second and direction."""

    peak: FloatArray  # FLOP/s that the power cap leaves of the dense 16-bit peak
    memory_bandwidth: FloatArray
    compute_units: FloatArray
    link: FloatArray  # per chip, inside a node
    nic: FloatArray = field(default_factory=_one)  # all NICs of a node together
    nics: FloatArray = field(default_factory=_one)
    chips_per_node: FloatArray = field(default_factory=_eight)  # that share native links
    pads_heads: FloatArray = field(default_factory=_zero)
    # What leaves so many neighbouring nodes shares ways up that carry so many times less than
    # their NICs: a leaf group's, and those of the groups above it.
    leaf_nodes: FloatArray = field(default_factory=_unlimited)
    leaf_over: FloatArray = field(default_factory=_one)
    pod_nodes: FloatArray = field(default_factory=_unlimited)
    pod_over: FloatArray = field(default_factory=_one)

    @property
    def has_tiers(self) -> bool:
        """Whether a tier lets less through than hangs below it."""
        return bool(np.any(self.leaf_over > 1.0) or np.any(self.pod_over > 1.0))

    @classmethod
    def of(cls, cluster: Cluster, pool: Pool, dtype: Dtype) -> Machine:
        """Return the machine that a pool of a cluster is, as 0-d arrays.

        The node is the largest island of native links, with its share of the NICs. Tiers count up
        to the one at which the pool's nodes meet.
        """
        node, chip = pool.node, pool.chip
        inside = max((i for i in node.islands), key=lambda i: len(i.slots), default=None)
        num_chips = len(inside.slots) if inside is not None else node.num_chips
        link = inside.bandwidth if inside is not None else node.effective_bridge.bandwidth
        share = num_chips / node.num_chips
        oversubscription = cluster.fabric.oversubscription_to(0) if pool.nodes > 1 else 1.0
        wanted = Dtype.BF16 if dtype in _NARROW else dtype
        return cls.filled(
            peak=chip.peak_flops(wanted, fallback=True) * chip.sustained,
            memory_bandwidth=chip.memory_bandwidth,
            compute_units=chip.compute_units,
            link=link,
            # A pool of one node needs no NIC; the smallest rate keeps divisions defined.
            nic=max(1.0, node.nic_bandwidth * share / oversubscription),
            nics=max(1.0, len(node.nics) * share),
            chips_per_node=num_chips,
            pads_heads=float(chip.vendor in _PADS_HEADS),
            **_tiers(cluster, pool, 1.0 / share),
        )


def _tiers(cluster: Cluster, pool: Pool, per_node: float) -> dict[str, float]:
    """Return the fields of a pool's tiers; `per_node` islands are a node."""
    fabric = cluster.fabric
    tiers: dict[str, float] = {}
    product, top = 1.0, spanning_tier(fabric, pool) if pool.nodes > 1 else 0
    for tier in range(1, top + 1):
        product *= fabric.tiers[tier].oversubscription
        if product == 1.0:
            continue
        name = "leaf" if tier == 1 else "pod"
        held = Counter(group_of(fabric, pool, node, tier - 1) for node in range(pool.nodes))
        nodes = max(held.values()) * per_node
        tiers[f"{name}_nodes"] = min(nodes, tiers.get(f"{name}_nodes", np.inf))
        tiers[f"{name}_over"] = product
    return tiers
