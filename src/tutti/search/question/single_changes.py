"""What-if changes of single chips, wires and links: those that make parts of a cluster.

"-chip a800/0/3" takes a chip out, "slow a800/0/3 0.7" lets one run at a fraction of its speed (of
"a800/0" all chips of the node), "wire a800/0 0.5" lets what leaves a node ("a800/0/3": by a chip's
NIC) have a fraction of its bandwidth, "link a800/0 a800/2 0.5" what goes between two wires.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.hardware.topology import Position
from tutti.hardware.wires import chips_of_wire, wire_of
from tutti.search.question.cluster_parts import ClusterParts, cluster_parts

PLACE = r"([^\s/*]+/\d{1,9}(?:/\d{1,9})?)"
NodePlace = tuple[str, int]  # pool, node


@dataclass(slots=True)
class SingleChanges:
    """Changes by chip, in the numbers of the cluster before; factors are shares that are left."""

    before: Cluster
    lost: list[Position] = field(default_factory=list)
    speeds: dict[Position, float] = field(default_factory=dict)
    wires: dict[tuple[str, ...], float] = field(default_factory=dict)

    def drop(self, name: str) -> str:
        """Take a chip out; return that in words."""
        self.lost.append(self._chips(name)[0])
        return f"-chip {name}"

    def slow(self, name: str, factor: float) -> str:
        """Slow a chip, or all of a node."""
        if factor > 1:
            raise InputError(f"the factor is {factor:g}; a chip is at most as quick as it is")
        self.speeds |= dict.fromkeys(self._chips(name), factor)
        return f"{name} at {factor:g} of its speed"

    def slow_wire(self, names: tuple[str, ...], factor: float) -> str:
        """Slow a wire, or the link between two."""
        if factor > 1:
            raise InputError(f"the factor is {factor:g}; a wire carries at most what it can")
        ends = tuple(wire_of(self.before, chips_of_wire(self.before, n)[0]) for n in names)
        if len(set(ends)) < len(ends):
            raise InputError(f"{names[0]} and {names[1]} are on one wire; a link joins two")
        self.wires[ends] = factor
        what = "wire" if len(ends) == 1 else "link"
        return f"{what} {'-'.join(names)} at {factor:g} of its bandwidth"

    def parts(self, cluster: Cluster, moved: Mapping[NodePlace, NodePlace]) -> ClusterParts | None:
        """Return the parts that these changes make of a cluster; None where there are none.

        `moved` says where the nodes are in it.
        """
        if not (self.lost or self.speeds or self.wires):
            return None

        def there(chip: Position) -> Position:
            node = moved.get((chip.pool, chip.node))
            if node is None:
                raise InputError(f"node {chip.pool}/{chip.node} is gone already")
            return Position(*node, chip.slot)

        wires = {
            tuple(wire_of(cluster, there(chips_of_wire(self.before, n)[0])) for n in ends): 1 / f
            for ends, f in self.wires.items()
        }
        slow = {there(chip): 1 / factor for chip, factor in self.speeds.items()}
        parts = cluster_parts(cluster, [there(chip) for chip in self.lost], slow, wires)
        if parts is None:
            raise InputError(f"nothing would be left of '{self.before.name}'")
        return parts

    def _chips(self, name: str) -> tuple[Position, ...]:
        if name.count("/") == 1:
            return chips_of_wire(self.before, name)
        chip = Position.parse(name)
        self.before.link(chip, chip)  # says what does not exist
        return (chip,)
