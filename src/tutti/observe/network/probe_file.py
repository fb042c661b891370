"""The file that agents and their collector share: hosts, switches, ports."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tutti import files
from tutti.document import Place, build_fields
from tutti.errors import InputError, hint

_MOST_HOSTS = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFile:
    """Who probes whom.

    `collector` is `address:port` or `unix:PATH`; `port` is what probes are sent to, the `ports`
    numbers after it are the source ports to try.
    """

    hosts: Mapping[str, str]
    collector: str
    switches: Mapping[str, str] = field(default_factory=dict)  # name by address
    port: int = 7070
    ports: int = 24
    peers: int = 8  # of each host, at most

    @classmethod
    def load(cls, path: Path) -> ProbeFile:
        """Read a file; what cannot be is refused."""
        probe_file = build_fields(cls, files.read_file(path), Place(path.name))
        probe_file.check(path.name)
        return probe_file

    def check(self, name: str) -> None:
        """Refuse addresses, ports and numbers that cannot be."""
        if len(self.hosts) < 2:
            raise InputError(f"{name}: 'hosts' has {len(self.hosts)}; probes need two or more")
        if len(self.hosts) > _MOST_HOSTS:
            raise InputError(f"{name}: 'hosts' has {len(self.hosts):,}; {_MOST_HOSTS:,} at most")
        for where, address in [*self.hosts.items(), *((a, a) for a in self.switches)]:
            try:
                ipaddress.IPv4Address(address)
            except ValueError:
                raise InputError(f"{name}: '{where}': '{address}' is no IPv4 address") from None
        if len(set(self.hosts.values())) < len(self.hosts):
            twice = next(a for a in self.hosts.values() if [*self.hosts.values()].count(a) > 1)
            raise InputError(f"{name}: two hosts have the address {twice}")
        if not 1024 <= self.port <= 65535 - self.ports - 1:
            raise InputError(f"{name}: 'port' is {self.port}; 1024-{65534 - self.ports} can be")
        for word, number, most in (("ports", self.ports, 64), ("peers", self.peers, _MOST_HOSTS)):
            if not 1 <= number <= most:
                raise InputError(f"{name}: '{word}' is {number}; 1-{most} can be")
        if not self.collector.startswith("unix:"):
            address, _, port = self.collector.rpartition(":")
            if not address or not port.isdigit() or not 0 < int(port) < 65536:
                raise InputError(
                    f"{name}: 'collector' is '{self.collector}'; write address:port or unix:PATH"
                )

    def number(self, host: str) -> int:
        """Return a host's place in the file."""
        if host not in self.hosts:
            raise InputError(f"no host '{host}' in the file; {hint(host, self.hosts)}")
        return list(self.hosts).index(host)

    def peers_of(self, host: str) -> list[int]:
        """Return whom a host probes: all others, or so many evenly spread among them."""
        own, count = self.number(host), len(self.hosts)
        step = max(1, (count - 1) // self.peers)
        offsets = range(1, count, step)
        return [(own + offset) % count for offset in offsets][: self.peers]
