"""Test bed: hosts as network namespaces, joined by rate-limited wires, on one Linux machine.

Every host has one NIC per rail; a rail is a switch (bridge), and rails meet at a spine that lets
less through. Rates are kept by `tc tbf` in both directions. A process of user `USER + rail` leaves
its host by that rail's NIC, whatever library it uses. Needs root.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tutti.bench.beds.namespaces import Namespaces, why_not
from tutti.comm.places import Place
from tutti.errors import InputError, hint
from tutti.ranks.standing_processes import StandingRanks

USER = 61000
__all__ = ["BEDS", "MEGABIT", "USER", "Bed", "BedSpec", "address", "bed_ranks", "why_not"]
_MTU = 9000
_SEGMENT = 16384  # largest piece that the kernel hands to a NIC at once
_BURST = 32768
_QUEUE = 2 << 20  # bytes that a port holds before packets are lost: as good as never
MEGABIT = 125_000.0  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BedSpec:
    """What a bed looks like; rates in Mbit/s."""

    name: str
    nics: tuple[tuple[float, ...], ...]  # per host, the rate of each of its NICs
    ranks_per_host: int = 1
    spine: float | None = None  # of each rail's way to the others; None: not limited
    scattered: bool = False  # ranks are handed out to hosts in turn
    as_given: bool = False  # ranks stay in the order in which they came, whatever the wire
    # Of whoever sends, unless a socket asks for another: one that keeps a link full, everywhere.
    senders: str = "reno"
    summary: str = ""

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.nics) * self.ranks_per_host

    def home(self, rank: int) -> tuple[int, int]:
        """Return a rank's host and its number there."""
        if self.scattered:
            return rank % len(self.nics), rank // len(self.nics)
        return divmod(rank, self.ranks_per_host)

    def rail(self, rank: int) -> int:
        """Return the rail of a rank: its NIC."""
        host, number = self.home(rank)
        return number % len(self.nics[host])

    def place(self, rank: int) -> Place:
        """Return a rank's place."""
        host, _ = self.home(rank)
        rail = self.rail(rank)
        sharing = sum(
            1 for other in range(self.world)
            if self.home(other)[0] == host and self.rail(other) == rail
        )  # fmt: skip
        return Place(
            host=f"bed{host}",
            rail=rail,
            bandwidth=self.nics[host][rail] * MEGABIT / sharing,
            addresses=(address(host, rail),),
            island=str(rank) if self.as_given else "",
            wire=(rank,) if self.as_given else (host,),
        )


BEDS = {
    spec.name: spec
    for spec in (
        BedSpec(name="pair", nics=((200,), (200,)), summary="two hosts, one rank each"),
        BedSpec(
            name="unequal",
            nics=((100,), (400,), (100,), (400,)),
            summary="four hosts, NICs 1:4",
        ),
        BedSpec(
            name="rails",
            nics=((100, 100),) * 4,
            ranks_per_host=2,
            spine=100.0,
            summary="four hosts with two rails, the spine 4:1",
        ),
        BedSpec(
            name="scattered",
            nics=((200,),) * 3,
            ranks_per_host=2,
            scattered=True,
            summary="three hosts of two ranks, ranks handed out in turn",
        ),
        BedSpec(
            name="mixed",
            nics=((100, 100), (200,), (100,)),
            ranks_per_host=2,
            summary="three hosts of two ranks, one or two NICs",
        ),
    )
}


def address(host: int, rail: int) -> str:
    """Return the address of a host's NIC."""
    return f"10.77.{rail}.{host + 1}"


def _hardware(host: int, rail: int) -> str:
    return f"02:77:00:00:{rail:02x}:{host + 1:02x}"


class Bed(Namespaces):
    """Hosts and wires that exist until `close`."""

    def __init__(self, spec: BedSpec) -> None:
        reason = why_not()
        if reason is not None:
            raise InputError(reason)
        control = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
        known = control.read_text(encoding="utf-8").split()
        if spec.senders not in known:
            raise InputError(f"--senders: '{spec.senders}'; {hint(spec.senders, known)}")
        super().__init__()
        self.spec = spec
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        spec = self.spec
        fabric = self.hold()
        hosts = [self.hold() for _ in spec.nics]
        rails = max(map(len, spec.nics))
        lines = ["link add spine type bridge", "link set spine up"]
        for rail in range(rails):
            lines += [
                f"link add rail{rail} type bridge",
                f"link set rail{rail} up",
                f"link add up{rail} mtu {_MTU} type veth peer name down{rail} mtu {_MTU}",
                f"link set up{rail} master rail{rail} up",
                f"link set down{rail} master spine up",
            ]
        for host, rates in enumerate(spec.nics):
            for rail in range(len(rates)):
                lines += [
                    f"link add port{host}.{rail} mtu {_MTU} gso_max_size {_SEGMENT} type veth "
                    f"peer name nic{rail} mtu {_MTU} gso_max_size {_SEGMENT} "
                    f"address {_hardware(host, rail)} netns {hosts[host]}",
                    f"link set port{host}.{rail} master rail{rail} up",
                ]
        self.inside(fabric, ["ip", "-batch", "-"], lines)
        limits = []
        if spec.spine is not None:
            ends = [f"{end}{rail}" for rail in range(rails) for end in ("up", "down")]
            limits += [_limit(end, spec.spine) for end in ends]
        for host, rates in enumerate(spec.nics):
            limits += [_limit(f"port{host}.{rail}", rate) for rail, rate in enumerate(rates)]
        self.inside(fabric, ["tc", "-batch", "-"], limits)
        for host, rates in enumerate(spec.nics):
            self._furnish(hosts[host], host, rates)

    def _furnish(self, holder: int, host: int, rates: Sequence[float]) -> None:
        """Give a host its addresses, its routes by user, and everybody's hardware addresses."""
        lines = ["link set lo up"]
        for rail in range(len(rates)):
            lines += [
                f"link set nic{rail} arp off",
                f"address add {address(host, rail)}/32 dev nic{rail}",
                f"link set nic{rail} up",
                f"route add 10.77.0.0/16 dev nic{rail} src {address(host, rail)} "
                f"table {100 + rail}",
                f"rule add uidrange {USER + rail}-{USER + rail} lookup {100 + rail}",
            ]
            for other, others in enumerate(self.spec.nics):
                for far in range(len(others)):
                    if other != host:
                        lines.append(
                            f"neigh add {address(other, far)} lladdr {_hardware(other, far)} "
                            f"dev nic{rail} nud permanent"
                        )
        # found before the rules above: who has chosen an address leaves by its NIC
        lines += [
            f"rule add from {address(host, rail)} lookup {100 + rail}" for rail in range(len(rates))
        ]
        lines.append(f"route add 10.77.0.0/16 dev nic0 src {address(host, 0)}")
        self.inside(holder, ["ip", "-batch", "-"], lines)
        limits = [_limit(f"nic{rail}", rate) for rail, rate in enumerate(rates)]
        self.inside(holder, ["tc", "-batch", "-"], limits)
        sending = {
            "tcp_congestion_control": self.spec.senders,
            "tcp_slow_start_after_idle": "0",
        }
        for name, value in sending.items():
            self.inside(holder, ["tee", f"/proc/sys/net/ipv4/{name}"], [value])

    def homes(self) -> list[tuple[int, int]]:
        """Return each rank's host process and user, as `LocalRanks` takes them."""
        ranks = range(self.spec.world)
        return [(self.holders[1 + self.spec.home(r)[0]], USER + self.spec.rail(r)) for r in ranks]

    def sent_bytes(self) -> dict[str, int]:
        """Return what each wire has carried: "host/rail" out of a NIC, "spine/rail" up to it."""
        sent = {}
        for host in range(len(self.spec.nics)):
            for name, count in self._counters(self.holders[1 + host]).items():
                if name.startswith("nic"):
                    sent[f"{host}/{name.removeprefix('nic')}"] = count
        for name, count in self._counters(self.holders[0]).items():
            if name.startswith("up"):
                sent[f"spine/{name.removeprefix('up')}"] = count
        return sent

    def _counters(self, holder: int) -> dict[str, int]:
        text = self.inside(holder, ["ip", "-s", "-j", "link"], [])
        return {link["ifname"]: link["stats64"]["tx"]["bytes"] for link in json.loads(text)}


def _limit(device: str, rate: float) -> str:
    return f"qdisc add dev {device} root tbf rate {rate}mbit burst {_BURST} limit {_QUEUE}"


@contextlib.contextmanager
def bed_ranks(spec: BedSpec) -> Iterator[tuple[Bed, StandingRanks]]:
    """Build a bed with its rank processes, and remove both."""
    bed = Bed(spec)
    try:
        ranks = StandingRanks(spec.world, bed.homes())
        try:
            yield bed, ranks
        finally:
            ranks.close()
    finally:
        bed.close()
