"""What the cost model says of one block on ranks that have a node each, and of what stands beside.

The links are those just measured; the chip is made up, so fast that the products beside collectives
take `balance` times as long as these. The same functions declare the times of products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from tutti.cost.arrays import Machine, Shape, Strategy
from tutti.cost.constants import Constants
from tutti.cost.network.closed_forms import all_to_all_seconds
from tutti.cost.operators.block_products import Products, shared_products
from tutti.cost.operators.exposed_communication import (
    ALIGNED_SPANS,
    expert_parallel,
    in_chunks,
    tensor_parallel,
)
from tutti.cost.operators.operator_times import ELEMENT_BYTES, Passes, gemm_seconds
from tutti.hardware.profile import LinkFigure

Subject = Literal["products", "experts"]
_FAST = 1e15  # bytes per second of a memory that holds nothing up
_SLOW = 1e9  # FLOP/s, to begin with


class Pair(NamedTuple):
    """Collectives that follow each other, and the seconds of what can run beside them."""

    collectives: int
    beside_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """A block, its ranks and their links."""

    subject: Subject
    shape: Shape
    strategy: Strategy
    machine: Machine
    constants: Constants

    @classmethod
    def of(
        cls,
        subject: Subject,
        shape: Shape,
        *,
        ranks: int,
        tokens: int,
        link: LinkFigure,
        balance: float,
    ) -> Pricing:
        """Choose the chip's speed by the balance that is wanted."""
        if subject == "products":
            strategy = Strategy.filled(sequence_length=tokens, tp=ranks, sequence_parallel=1.0)
        else:
            strategy = Strategy.filled(sequence_length=tokens, ep=ranks, shared_beside=1.0)
        machine = Machine.filled(
            peak=_SLOW, memory_bandwidth=_FAST, compute_units=1, link=_FAST, nic=link.bandwidth,
            chips_per_node=1,
        )  # fmt: skip
        constants = Constants(
            nic_efficiency=1.0, nic_latency_s=link.latency_s, link_latency_s=1e-6,
            gemm_efficiency=1.0, kernel_gap_s=0.0, gemm_fill_s=1e-12,
        )  # fmt: skip
        slow = cls(
            subject=subject, shape=shape, strategy=strategy, machine=machine, constants=constants
        )
        products = sum(float(one.forward + one.backward_input) for one in slow._products())
        peak = _SLOW * products / (balance * slow._collectives_s())
        return replace(slow, machine=replace(machine, peak=np.asarray(peak)))

    def product_seconds(self, m: int, n: int, k: int) -> float:
        """Return what the chip takes for (m × k)·(k × n)."""
        return float(gemm_seconds(m, n, k, self.machine, self.constants))

    def exposed_s(self, chunks: int) -> float:
        """Return what a block's collectives add to both passes."""
        strategy = replace(self.strategy, overlap_chunks=np.asarray(float(chunks)))
        args = (self.shape, strategy, self.machine, self.constants)
        if self.subject == "experts":
            halves = shared_products(*args)
            priced = expert_parallel(self._once(), self.shape, strategy, halves)
        else:
            products = Products.of(*args)
            whole = products.attention.plus(products.feed_forward)
            uncut = tensor_parallel(*args)
            _, priced = in_chunks(*args, ALIGNED_SPANS, whole, uncut, np.zeros(()))
        return float(priced.forward + priced.backward)

    def pairs(self, chunks: int) -> list[Pair]:
        """Return a block's collectives in the order in which they run, and what runs beside them.

        A collective can run beside the product that it stands next to and no other, for the one
        needs what the other makes. Only the input of a column product that is gathered once more in
        backward (where it is cut at all) can run beside anything, until the weight's gradient asks
        for it. Nothing runs while experts are told how many rows will come.
        """
        each = self._products(chunks)
        forward = [Pair(chunks, chunks * float(one.forward)) for one in each]
        backward = [Pair(chunks, chunks * float(one.backward_input)) for one in reversed(each)]
        if self.subject == "experts":
            return [Pair(1, 0.0), *forward, *backward]
        again = Pair(1 if chunks > 1 else 0, math.inf)
        return [*forward, backward[0], again, *backward[1:3], again, backward[3]]

    def _products(self, chunks: int = 1) -> Sequence[Passes]:
        """Return the products beside collectives, of one piece."""
        pieces = replace(self.strategy, sequences=self.strategy.sequences / chunks)
        args = (self.shape, pieces, self.machine, self.constants)
        return shared_products(*args) if self.subject == "experts" else Products.of(*args)

    def _once(self) -> np.typing.NDArray[np.float64]:
        """Return the way to the experts, or back."""
        sent = self.strategy.tokens * self.shape.topk * self.shape.hidden * ELEMENT_BYTES
        ep = self.strategy.ep
        return all_to_all_seconds(sent, ep, 1.0, self.machine, self.constants)

    def _collectives_s(self) -> float:
        if self.subject == "experts":
            return 4.0 * float(self._once())
        args = (self.shape, self.strategy, self.machine, self.constants)
        whole = tensor_parallel(*args)
        return float(whole.forward + whole.backward)


def could_hide(collectives: Sequence[float], pairs: Sequence[Pair]) -> float:
    """Return the seconds that infinitely fine pieces could hide: of each pair the shorter."""
    if sum(pair.collectives for pair in pairs) != len(collectives):
        raise RuntimeError(f"a block ran {len(collectives)} collectives, other than expected")
    total, first = 0.0, 0
    for count, beside_s in pairs:
        total += min(sum(collectives[first : first + count]), beside_s)
        first += count
    return total
