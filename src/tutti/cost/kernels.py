"""What a software stack computes with, as far as seconds or bytes depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tutti.models.memory import Recompute
from tutti.models.operators import LOGIT_CHUNK_BYTES


class RecomputedShares(NamedTuple):
    """Shares of a block's forward pass that run again before its backward pass."""

    products: float
    attention: float
    elementwise: float
    collectives: float


RECOMPUTED_SHARES: Mapping[Recompute, RecomputedShares] = {
    "none": RecomputedShares(0.0, 0.0, 0.0, 0.0),
    "selective": RecomputedShares(0.0, 1.0, 0.0, 0.0),
    "full": RecomputedShares(1.0, 1.0, 1.0, 1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The kernels of a stack. The defaults are those of tutti's own engine."""

    fused_attention: bool = True
    fused_cross_entropy: bool = True
    logit_chunk_bytes: float = LOGIT_CHUNK_BYTES  # held at a time; math.inf: all of a micro-batch
    compiled: bool = False  # element-wise operators run together, as a compiler fuses them
    asynchronous_tp: bool = False  # products run beside their collectives, tile by tile
    split_backward: bool = True  # gradients of inputs leave before those of weights are computed
    dispatches_once: bool = False  # a token goes to a node once, and from there to its experts
    row_scales: bool = False  # of products in 8 bits; otherwise one scale per tensor
    gathered_bytes: float | None = None  # of a parameter that travels; None: as it is held
    recomputed: Mapping[Recompute, RecomputedShares] = field(
        default_factory=lambda: RECOMPUTED_SHARES
    )
