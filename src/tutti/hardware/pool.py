"""A pool: equal nodes of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from tutti.document import Above, AtLeast, AtMost, Quantity, Seconds, Watts
from tutti.hardware.chip import Chip, Dtype, check_name
from tutti.hardware.leaves import Leaves
from tutti.hardware.node import NodeType

NodeCount = Annotated[int, AtLeast(1), AtMost(1_000_000)]
Price = Annotated[float, AtLeast(0), AtMost(1e9)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Equal nodes. Unequal nodes are several pools."""

    name: str
    node: NodeType
    nodes: NodeCount = 1
    stack: str = ""
    """The software stack, such as "CUDA 12.4 + NCCL 2.21"; profiles are looked up by it."""
    price_per_chip_hour: Price | None = None
    watts: Watts | None = None
    """Per chip, where it is not the chip's own figure."""
    mean_time_between_failures_s: Annotated[float, Quantity("s"), Above(0)] | None = None
    """Of one node: how long it runs, on average, before something in it ends the job."""
    restart_s: Seconds = 0.0
    """What a job loses at a failure besides its work and the reading of its checkpoint."""
    leaves: Leaves = field(default_factory=Leaves)
    """The leaf group of each node; none named: leaves of its own, filled in order."""

    def __post_init__(self) -> None:
        check_name(self.name, "pool")
        if len(self.leaves) not in (0, self.nodes):
            raise ValueError(
                f"'leaves' names the leaves of {len(self.leaves)} nodes, but there are "
                f"{self.nodes}; name one for each, such as '0*{self.nodes}'"
            )
        if self.nodes > 1 and not self.node.all_reach_a_nic:
            raise ValueError(
                f"{self.nodes} nodes of type '{self.node.name}', but some chips reach no NIC; "
                "add 'nics' to the node type"
            )

    @property
    def chip(self) -> Chip:
        """The kind of chip in every node."""
        return self.node.chip

    def of_nodes(self, nodes: Sequence[int | None]) -> Pool:
        """Return the pool of some of its nodes, each in its place; None stands for a new node.

        Where new nodes hang nobody knows: a pool with new ones names no leaves.
        """
        known = [node for node in nodes if node is not None]
        named = len(self.leaves) and len(known) == len(nodes)
        numbers = tuple(self.leaves.numbers[node] for node in known) if named else ()
        return replace(self, nodes=len(nodes), leaves=Leaves(numbers))

    @property
    def num_chips(self) -> int:
        """Chips in all nodes."""
        return self.nodes * self.node.num_chips

    @property
    def chip_watts(self) -> float | None:
        """Watts per chip, where known."""
        return self.chip.watts if self.watts is None else self.watts

    def peak_flops(self, dtype: Dtype, *, fallback: bool = False) -> float:
        """Return the dense peak of all chips."""
        return self.num_chips * self.chip.peak_flops(dtype, fallback=fallback)
