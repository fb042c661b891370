"""Clos bed: hosts, leaves and spines as network namespaces, ways chosen by the kernel's ECMP.

Every wire is a pair of virtual NICs whose rate `tc tbf` keeps in both directions. All NICs have one
hardware address and ask nobody for others, so that routes need no neighbours. Switches hash the
five numbers of a connection; which spine it takes is asked of the leaf's routing table. The same
network as a cluster gives the wiring that flows are predicted on. Needs root.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tutti.bench.beds.namespaces import Namespaces, why_not
from tutti.document import Place
from tutti.errors import InputError
from tutti.fabric.wiring import Integers, Wiring, wire
from tutti.hardware.cluster import Cluster

MEGABIT = 125_000.0  # bytes per second
_HARDWARE = "02:88:00:00:00:01"
_BURST = 16384
_TURN = 100  # packets of a connection that a NIC holds
_HASH = {"fib_multipath_hash_policy": 3, "fib_multipath_hash_fields": 55}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosSpec:
    """What a bed looks like; rates in Mbit/s."""

    leaves: int = 3
    hosts_per_leaf: int = 3
    spines: int = 4
    host_rate: float = 40.0
    up_rate: float = 20.0
    queue: int = 96 * 1024  # bytes that a port holds before packets are lost
    seed: int = 1  # of the switches' hashes

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return self.leaves * self.hosts_per_leaf

    def address(self, host: int) -> str:
        """Return a host's address."""
        leaf, number = divmod(host, self.hosts_per_leaf)
        return f"10.88.{leaf}.{number + 1}"

    def cluster(self) -> Cluster:
        """Return the same network as a cluster: a node of one chip and one NIC per host."""
        offered, carried = self.hosts_per_leaf * self.host_rate, self.spines * self.up_rate
        node = {
            "name": "bed-host", "chip": "L40S", "num_chips": 1,
            "nics": [{"rate": f"{self.host_rate} Mb/s", "slots": "0"}],
        }  # fmt: skip
        tiers = [
            {"name": "leaf", "nodes": self.hosts_per_leaf},
            {"name": "spine", "oversubscription": max(1.0, offered / carried),
             "port_rate": f"{self.up_rate} Mb/s"},
        ]  # fmt: skip
        document = {
            "name": "clos-bed", "nodes": [node],
            "pools": [{"name": "host", "node": "bed-host", "nodes": self.hosts}],
            "fabric": {"tiers": tiers, "routing": "ecmp"},
        }  # fmt: skip
        return Cluster.from_document(document, Place("clos-bed"))


class ClosBed(Namespaces):
    """A bed that exists until `close`; holders are the hosts, then leaves, then spines."""

    def __init__(self, spec: ClosSpec) -> None:
        reason = why_not()
        if reason is not None:
            raise InputError(reason)
        super().__init__()
        self.spec = spec
        self.wiring: Wiring = wire(spec.cluster())
        if self.wiring.layers[0].ways != spec.spines:
            raise InputError(
                f"a bed of {spec.spines} spines needs hosts that offer as much: "
                f"{spec.hosts_per_leaf} × {spec.host_rate} Mbit/s are fewer than "
                f"{spec.spines} × {spec.up_rate}"
            )
        try:
            for _ in range(spec.hosts + spec.leaves + spec.spines):
                self.hold()
            for leaf in range(spec.leaves):
                self._build_leaf(leaf)
            for number in range(len(self.holders)):
                self._furnish(number)
        except BaseException:
            self.close()
            raise

    def host(self, number: int) -> int:
        """Return the process that holds a host's namespace."""
        return self.holders[number]

    def leaf(self, number: int) -> int:
        """Return the process that holds a leaf's namespace."""
        return self.holders[self.spec.hosts + number]

    def spine(self, number: int) -> int:
        """Return the process that holds a spine's namespace."""
        return self.holders[self.spec.hosts + self.spec.leaves + number]

    def _build_leaf(self, leaf: int) -> None:
        spec = self.spec
        first = leaf * spec.hosts_per_leaf
        lines = [_wire(f"h{h}", "nic", self.host(first + h)) for h in range(spec.hosts_per_leaf)]
        lines += [_wire(f"s{s}", f"l{leaf}", self.spine(s)) for s in range(spec.spines)]
        self.inside(self.leaf(leaf), ["ip", "-batch", "-"], lines)

    def _devices(self, number: int) -> list[tuple[str, float]]:
        """Return a namespace's NICs and their rates."""
        spec = self.spec
        if number < spec.hosts:
            return [("nic", spec.host_rate)]
        if number < spec.hosts + spec.leaves:
            return [(f"h{h}", spec.host_rate) for h in range(spec.hosts_per_leaf)] + [
                (f"s{s}", spec.up_rate) for s in range(spec.spines)
            ]
        return [(f"l{leaf}", spec.up_rate) for leaf in range(spec.leaves)]

    def _furnish(self, number: int) -> None:
        """Bring up a namespace's NICs, limit them, and write its routes."""
        spec, holder, devices = self.spec, self.holders[number], self._devices(number)
        lines = ["link set lo up"]
        lines += [f"link set {name} address {_HARDWARE} arp off up" for name, _ in devices]
        leaf = number - spec.hosts
        if number < spec.hosts:
            own = spec.address(number)
            lines += [f"address add {own}/32 dev nic", f"route add 10.88.0.0/16 dev nic src {own}"]
        elif leaf < spec.leaves:
            lines.append(f"address add 10.88.200.{leaf + 1}/32 dev lo")
            for h in range(spec.hosts_per_leaf):
                address = spec.address(leaf * spec.hosts_per_leaf + h)
                lines.append(f"route add {address}/32 dev h{h}")
            lines += self._ways_up(leaf, "add")
        else:
            lines.append(f"address add 10.88.201.{leaf - spec.leaves + 1}/32 dev lo")
            lines += [f"route add 10.88.{o}.0/24 dev l{o}" for o in range(spec.leaves)]
        settings = {"ip_forward": 1, "conf.all.rp_filter": 0, "conf.default.rp_filter": 0}
        settings |= _HASH | {
            "fib_multipath_hash_seed": spec.seed,
            "tcp_no_metrics_save": 1,
            "icmp_ratelimit": 0,  # switches answer as many traces as come
        }
        for name, value in settings.items():
            path = f"/proc/sys/net/ipv4/{name.replace('.', '/')}"
            self.inside(holder, ["tee", path], [str(value)])
        self.inside(holder, ["ip", "-batch", "-"], lines)
        limits = [_limit("add", name, rate, spec.queue) for name, rate in devices]
        self.inside(holder, ["tc", "-batch", "-"], limits)

    def _ways_up(self, leaf: int, verb: str) -> list[str]:
        """Return the lines that give a leaf its routes to the others, over all spines."""
        ways = " ".join(f"nexthop dev s{s}" for s in range(self.spec.spines))
        others = (other for other in range(self.spec.leaves) if other != leaf)
        return [f"route {verb} 10.88.{other}.0/24 {ways}" for other in others]

    def write_routes(self, leaf: int, spine: int) -> None:
        """Write the routes again that went with a link, after it has come back."""
        down = f"route replace 10.88.{leaf}.0/24 dev l{leaf}"
        self.inside(self.leaf(leaf), ["ip", "-batch", "-"], self._ways_up(leaf, "replace"))
        self.inside(self.spine(spine), ["ip", "-batch", "-"], [down])

    def share(self, ports: Sequence[int]) -> None:
        """Let every NIC serve connections in turn, known by their source ports; replies go first.

        A connection then gets its fair share wherever it meets others, as the flow model assumes;
        in one queue for all, senders that lose packets at two places get less than that.
        """
        self._take_turns([f"sport {port} 0xffff" for port in ports])

    def share_by_sender(self) -> None:
        """Let every NIC serve hosts in turn, known by their addresses: as `share`, host by host."""
        hosts = range(self.spec.hosts)
        self._take_turns([f"src {self.spec.address(host)}/32" for host in hosts])

    def _take_turns(self, matches: Sequence[str]) -> None:
        for number, holder in enumerate(self.holders):
            lines = [
                line for name, rate in self._devices(number) for line in _turns(name, rate, matches)
            ]
            self.inside(holder, ["tc", "-batch", "-"], lines)

    def limit(self, leaf: int, spine: int, rate: float, *, down: bool = False) -> None:
        """Give the link between a leaf and a spine another rate, one way."""
        holder = self.spine(spine) if down else self.leaf(leaf)
        device = f"l{leaf}" if down else f"s{spine}"
        self.inside(
            holder, ["tc", "-batch", "-"], [_limit("replace", device, rate, self.spec.queue)]
        )

    def way(self, source: int, target: int, ports: tuple[int, int]) -> int | None:
        """Return the spine that a connection between two hosts takes; None: none, one leaf."""
        spec = self.spec
        leaf, number = divmod(source, spec.hosts_per_leaf)
        if leaf == target // spec.hosts_per_leaf:
            return None
        asked = (
            f"route get {spec.address(target)} from {spec.address(source)} iif h{number} "
            f"ipproto tcp sport {ports[0]} dport {ports[1]}"
        )
        (route,) = json.loads(self.inside(self.leaf(leaf), ["ip", "-j", *asked.split()], []))
        return int(route["dev"].removeprefix("s"))

    def links(self, source: int, target: int, spine: int | None) -> Integers:
        """Return the links of a path as the wiring numbers them."""
        wiring, layer = self.wiring, self.wiring.layers[0]
        links = np.full(4, -1, dtype=np.int64)
        links[0], links[3] = source, wiring.num_ports + target
        if spine is not None:
            per_leaf = self.spec.hosts_per_leaf
            links[1] = layer.up + source // per_leaf * layer.ways + spine
            links[2] = layer.down + target // per_leaf * layer.ways + spine
        return links


def _wire(device: str, peer: str, holder: int) -> str:
    return f"link add {device} mtu 1500 type veth peer name {peer} mtu 1500 netns {holder}"


def _turns(device: str, rate: float, matches: Sequence[str]) -> list[str]:
    """Return the lines that give a NIC one queue per match on packets, served in turn."""
    on, burst = f"dev {device}", f"burst {_BURST} cburst {_BURST} quantum 1514"
    lines = [
        f"qdisc del {on} root",
        f"qdisc add {on} root handle 1: htb default 2",
        f"class add {on} parent 1: classid 1:1 htb rate {rate}mbit ceil {rate}mbit {burst}",
        f"class add {on} parent 1:1 classid 1:2 htb rate {rate / 10}mbit ceil {rate}mbit prio 0 "
        f"{burst}",
    ]
    for number, match in enumerate(matches):
        own = f"1:{16 + number:x}"
        each = 0.8 * rate / len(matches)
        lines += [
            f"class add {on} parent 1:1 classid {own} htb rate {each}mbit ceil {rate}mbit prio 1 "
            f"{burst}",
            f"qdisc add {on} parent {own} pfifo limit {_TURN}",
            f"filter add {on} parent 1: protocol ip prio 1 u32 match ip {match} flowid {own}",
        ]
    return lines


def _limit(verb: str, device: str, rate: float, queue: int) -> str:
    return f"qdisc {verb} dev {device} root tbf rate {rate}mbit burst {_BURST} limit {queue}"
