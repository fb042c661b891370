"""What the cost model says of one block of tensor-parallel ranks, one to a node, in chunks.

The links are those just measured; the chip is made up, so fast that a block's products take
`balance` times as long as its collectives. The same functions declare the times of products.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from tutti.cost.arrays import Machine, Shape, Strategy
from tutti.cost.constants import Constants
from tutti.cost.exposed import in_chunks, tensor_parallel
from tutti.cost.operators import gemm_seconds
from tutti.cost.products import Products
from tutti.hardware.profile import LinkFigure

_FAST = 1e15  # bytes per second of a memory that holds nothing up


class Price(NamedTuple):
    """Exposed seconds of a block's collectives, and the seconds of each product beside one."""

    exposed_s: float
    forward_s: tuple[float, ...]  # into and out of attention, into and out of the feed-forward
    backward_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """A block, its ranks and their links."""

    shape: Shape
    strategy: Strategy
    machine: Machine
    constants: Constants

    @classmethod
    def of(
        cls, shape: Shape, *, ranks: int, tokens: int, link: LinkFigure, balance: float
    ) -> Pricing:
        """Choose the chip's speed by the balance that is wanted."""
        strategy = Strategy.filled(sequence_length=tokens, tp=ranks, sequence_parallel=1.0)
        machine = Machine.filled(
            peak=1e9, memory_bandwidth=_FAST, compute_units=1, link=_FAST, nic=link.bandwidth,
            chips_per_node=1,
        )  # fmt: skip
        constants = Constants(
            nic_efficiency=1.0, nic_latency_s=link.latency_s, link_latency_s=1e-6,
            gemm_efficiency=1.0, kernel_gap_s=0.0, gemm_fill_s=1e-12,
        )  # fmt: skip
        args = (shape, strategy, machine, constants)
        products = sum(float(one.forward + one.backward_input) for one in Products.of(*args))
        whole = tensor_parallel(*args, None)
        collectives = float(whole.forward + whole.backward)
        peak = 1e9 * products / (balance * collectives)
        faster = replace(machine, peak=np.asarray(peak))
        return cls(shape=shape, strategy=strategy, machine=faster, constants=constants)

    def product_seconds(self, m: int, n: int, k: int) -> float:
        """Return what the chip takes for (m × k)·(k × n)."""
        return float(gemm_seconds(m, n, k, self.machine, self.constants))

    def in_pieces(self, chunks: int) -> Price:
        """Return the price of a block whose products are cut."""
        strategy = replace(self.strategy, overlap_chunks=np.asarray(float(chunks)))
        args = (self.shape, strategy, self.machine, self.constants)
        products = Products.of(*args)
        whole = products.attention.plus(products.feed_forward)
        uncut = tensor_parallel(*args, None)
        _, exposed = in_chunks(*args, None, whole, uncut, np.zeros(()))
        pieces = replace(strategy, sequences=self.strategy.sequences / chunks)
        each = Products.of(self.shape, pieces, self.machine, self.constants)
        return Price(
            exposed_s=float(exposed.forward + exposed.backward),
            forward_s=tuple(chunks * float(one.forward) for one in each),
            backward_s=tuple(chunks * float(one.backward_input) for one in each),
        )
