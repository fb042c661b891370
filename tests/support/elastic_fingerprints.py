"""Which state of a small job it is, in 64 bits: `digest_of_alike` of states as numbers.

What can be told of a part of a state, with hosts in some order, is told once.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

from tests.support.elastic_exploration import Names, Telling, Unordered, renamed
from tests.support.elastic_parts import ASKED, EACH, LEFT, MEMBERS, Parts, State

_HASH = (1 << 64) - 1


class Fingerprints:
    """Tells states apart whose hosts have no names."""

    def __init__(self, parts: Parts) -> None:
        self._hosts, self._first = parts.hosts, parts.first
        self._values = parts.values
        self._told: dict[Any, int] = {}
        self._alone = [tuple(int(other == host) for other in self._hosts) for host in self._hosts]

    def of(self, state: State) -> int:
        """Return 64 bits that tell apart states of which `digest_of_alike` differs."""
        hosts, members = self._hosts, state[MEMBERS]
        newest = self._values[members].order
        own = [state[first : first + EACH] for first in self._first]
        alone = self._alone
        signs = [
            (
                self._host(own[host], newest, alone[host]),
                self._tell("s", members, newest, host),
            )
            for host in hosts
        ]
        order = sorted(hosts, key=signs.__getitem__)
        groups = [list(g) for _, g in itertools.groupby(order, key=signs.__getitem__)]
        least, left = 0, self._values[state[LEFT]]
        for orders in itertools.product(*(itertools.permutations(group) for group in groups)):
            order = list(itertools.chain(*orders))
            names = tuple(map(order.index, hosts))
            found = hash((
                left, self._tell("m", members, newest, names),
                self._tell("q", state[ASKED], newest, names),
                *(self._host(own[host], newest, names) for host in order),
            )) & _HASH  # fmt: skip
            least = min(least, found) if least else found
        return least or 1

    def _host(self, own: tuple[int, ...], newest: int, names: Names) -> int:
        key = own, newest, names
        found = self._told.get(key)
        if found is None:
            agent, process, up, down = own
            found = self._told[key] = hash((
                self._tell("a", agent, newest, names), self._tell("p", process, newest, names),
                self._tell("u", up, newest, names), self._tell("d", down, newest, names),
            ))  # fmt: skip
        return found

    def _tell(self, kind: str, part: int, newest: int, names: Any) -> int:
        key = kind, part, newest, names
        found = self._told.get(key)
        if found is None:
            found = self._told[key] = self._hash(kind, part, newest, names)
        return found

    def _hash(self, kind: str, part: int, newest: int, names: Any) -> int:
        telling, value = Telling(newest), self._values[part]
        match kind:
            case "m":  # with what it knows of hosts, in their new order
                order = sorted(self._hosts, key=names.__getitem__)
                known = tuple(telling.known(value, host) for host in order)
                told: Any = telling.members(value), known
            case "s":  # of one host, without naming another
                host, names = names, self._alone[names]
                common = tuple(p for p in telling.members(value) if isinstance(p, Unordered))
                told = common, telling.known(value, host)
            case "a":
                told = telling.agent(value)
            case "p":
                told = telling.process(value)
            case "u":
                told = telling.status(value.newest), telling.status(value.before)
            case "d":
                told = telling.order(value.newest), telling.order(value.before)
            case _:
                told = tuple(map(telling.question, value))
        digest = hashlib.blake2b(renamed(told, names), digest_size=8).digest()
        return int.from_bytes(digest) >> 3  # below Python's modulus: nothing is folded
