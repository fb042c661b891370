"""All-reduces that switches do (SHARP): every node sends once and receives the sum once.

Chips of one node add up among themselves, around a ring, and each sends its part over its NIC. Each
leaf adds up what its nodes send and passes one stream on; a spine does so for its leaves. Where all
nodes use the same rails, each rail is a tree of its own; else rails meet at the spines. A stream is
spread over as many trees as there are ways, so that all links of a switch carry a share. Pieces
follow each other through all of this, so that a group is one task: its busiest link sets its pace.
Against a ring, which sends everything twice, a NIC carries half.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tutti.errors import InputError
from tutti.fabric.failures import Failures
from tutti.fabric.paths import Flows, Rules, route_transfers
from tutti.fabric.replay import Replay, Teams
from tutti.fabric.wiring import Floats, Integers, Wiring
from tutti.hardware.topology import Position


class Trees(Teams):
    """Groups that switches add up for, side by side: of each the bytes on every link it uses."""

    def __init__(
        self, wiring: Wiring, groups: Integers, num_bytes: float, failures: Failures | None = None
    ) -> None:
        """Take a row of chips for each group; `addable` must have said yes."""
        rules = Rules.of(wiring)
        self.rules = Rules(routing=rules.routing)
        rings = [_in_node_rings(wiring, own) for own in groups]
        a, b = (np.concatenate([ring[side] for ring in rings]) for side in (0, 1))
        inside = route_transfers(wiring, a, b, self.rules, failures)
        each = inside.per_transfer
        loads = [_loads(wiring, own, num_bytes) for own in groups]
        alone = np.concatenate([links for links, _, _ in loads])
        links = np.full((inside.size + len(alone), inside.links.shape[1]), -1, dtype=np.int32)
        links[: inside.size] = inside.links
        links[inside.size :, 0] = alone
        group = np.arange(len(groups))
        self.teams = np.concatenate([
            np.repeat(np.repeat(group, [len(ring[0]) for ring in rings]), each),
            np.repeat(group, [len(one) for one, _, _ in loads]),
        ])  # fmt: skip
        around = np.concatenate([ring[2] for ring in rings]) * num_bytes
        self.num_bytes = np.concatenate([
            np.repeat(around / each, each), *(carried for _, carried, _ in loads),
        ])  # fmt: skip
        self.flows = Flows(
            transfers=len(links), per_transfer=1, links=links, unreachable=inside.unreachable,
            rates=inside.rates[: wiring.num_links],
        )  # fmt: skip
        self._payload = num_bytes
        tiers = wiring.fabric.tiers
        self._up_and_down_s = 2 * max(tiers[height].latency_s for _, _, height in loads)
        self._wiring, self._ends = wiring, (a, b)

    def connections(self, efficiency: float | Floats = 1.0) -> Floats:
        """Return the bytes per second that each group adds up, all at once."""
        return self.paces(efficiency) * self._payload

    @property
    def latency_s(self) -> float:
        """The way up and the way down; around a node's ring bytes follow each other."""
        return self._up_and_down_s


def addable(wiring: Wiring, groups: Integers) -> bool:
    """Tell whether switches can add up for these groups.

    Each must lie on more than one node, in one pool; every chip needs a NIC; and rails that never
    meet must be the same on all nodes.
    """
    for chips in groups:
        nodes, pools = (len(np.unique(of[chips])) for of in (wiring.chip_node, wiring.chip_pool))
        if nodes < 2 or pools > 1:
            return False
        if (wiring.chip_ports[chips][:, :1] < 0).any():
            return False
        if wiring.fabric.rail_only and not _aligned(wiring, *_streams(wiring, chips)):
            return False
    return True


def in_switch_all_reduce(
    chips: Sequence[Position],
    wiring: Wiring,
    num_bytes: float,
    *,
    failures: Failures | None = None,
    efficiency: float = 1.0,
) -> Replay:
    """Return how an all-reduce of `num_bytes` goes that switches add up on its way."""
    if not wiring.fabric.in_switch_reduction:
        raise InputError(
            f"cluster '{wiring.cluster.name}': its switches add nothing up; say "
            "'in_switch_reduction: true' of the fabric if they do"
        )
    group = np.array([[wiring.chip(chip) for chip in chips]], dtype=np.int64)
    if not addable(wiring, group):
        raise InputError(
            "switches add up for chips with NICs on several nodes of one pool, on the same rails "
            "where rails never meet; these are not"
        )
    trees = Trees(wiring, group, num_bytes, failures)
    pace = float(trees.paces(efficiency)[0])
    if pace <= 0:
        raise InputError("a switch on the way up has no link left; no tree joins these chips")
    total, size = 1.0 / pace + trees.latency_s, len(chips)
    return Replay(
        seconds=total, latency_s=trees.latency_s,
        bus_bandwidth=2 * (size - 1) / size * num_bytes / total,
        slowest_flow=num_bytes * pace, flows=trees.flows.size,
    )  # fmt: skip


def _in_node_rings(wiring: Wiring, chips: Integers) -> tuple[Integers, Integers, Floats]:
    """Return who sends to whom inside nodes, and which share of the bytes: summed, handed back."""
    node = wiring.chip_node[chips]
    rings = [chips[node == one] for one in np.unique(node)]
    rings = [ring for ring in rings if len(ring) > 1]
    nothing = np.zeros(0, dtype=np.int64)
    return (
        np.concatenate([nothing, *rings]),
        np.concatenate([nothing, *(np.roll(ring, -1) for ring in rings)]),
        np.concatenate([
            np.zeros(0), *(np.full(len(ring), 2 * (len(ring) - 1) / len(ring)) for ring in rings)
        ]),
    )  # fmt: skip


def _streams(wiring: Wiring, chips: Integers) -> tuple[Integers, Integers, Floats]:
    """Return the ports that a group uses, the node of each, and its share of the bytes."""
    node = wiring.chip_node[chips]
    _, which, count = np.unique(node, return_inverse=True, return_counts=True)
    ports = wiring.chip_ports[chips]
    there = ports >= 0
    share = 1.0 / (count[which.ravel()] * there.sum(axis=1))
    rows = np.nonzero(there)[0]
    return ports[there], node[rows], share[rows]


def _aligned(wiring: Wiring, ports: Integers, node: Integers, share: Floats) -> bool:
    """Tell whether all nodes send the same shares to the same leaves of their groups."""
    leaf = wiring.port_leaf[ports] % wiring.switches_per_group[0]
    table: dict[int, dict[int, float]] = {}
    for one, place, part in zip(node.tolist(), leaf.tolist(), share.tolist(), strict=True):
        own = table.setdefault(one, {})
        own[place] = own.get(place, 0.0) + part
    first, *others = table.values()
    return all(
        own.keys() == first.keys() and all(abs(own[at] - first[at]) < 1e-9 for at in own)
        for own in others
    )


def _loads(wiring: Wiring, chips: Integers, num_bytes: float) -> tuple[Integers, Floats, int]:
    """Return links, the bytes on each, and the tier at which all are added up."""
    ports, node, share = _streams(wiring, chips)
    links = [ports, wiring.num_ports + ports]
    carried = [share, share]
    leaf, leaf_share = _per_leaf(wiring, ports, node, share)
    groups = np.unique(leaf // wiring.switches_per_group[0])
    height = 0
    if wiring.layers and (len(groups) > 1 or not _aligned(wiring, ports, node, share)):
        for up, down, part in _upwards(wiring, groups, leaf, leaf_share):
            links += [up, down]
            carried += [part, part]
            height += 1
    return np.concatenate(links), np.concatenate(carried) * num_bytes, height


def _per_leaf(
    wiring: Wiring, ports: Integers, node: Integers, share: Floats
) -> tuple[Integers, Floats]:
    """Return the leaves, and the share of the bytes that each passes on: the most of its nodes."""
    key = wiring.port_leaf[ports] * (int(node.max()) + 1) + node
    pairs, which = np.unique(key, return_inverse=True)
    per_node = np.bincount(which.ravel(), weights=share)
    leaves, of_leaf = np.unique(pairs // (int(node.max()) + 1), return_inverse=True)
    most = np.zeros(len(leaves))
    np.maximum.at(most, of_leaf.ravel(), per_node)
    return leaves, most


def _upwards(
    wiring: Wiring, groups: Integers, switch: Integers, share: Floats
) -> Iterator[tuple[Integers, Integers, Floats]]:
    """Yield, layer by layer until all are joined, bundles up and down, and their shares."""
    lanes = wiring.lanes
    per_lane = np.full(lanes, 1.0 / wiring.fabric.planes)
    if wiring.fabric.rail_only:
        per_lane = np.zeros(lanes)
        np.maximum.at(per_lane, switch % lanes, share)
    for index, layer in enumerate(wiring.layers):
        yield layer.bundle_up + switch, layer.bundle_down + switch, share
        groups = np.unique(wiring.group_parent[index][groups])
        if len(groups) == 1:
            return
        switch = (groups[:, None] * lanes + np.arange(lanes)[None, :]).ravel()
        share = np.tile(per_lane, len(groups))
        switch, share = switch[share > 0], share[share > 0]
