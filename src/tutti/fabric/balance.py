"""Balance: what of a switch's ways up its traffic makes use of, by how the ways are chosen.

Packets that are spread evenly use all of it. Connections that are hashed do not: where F of them
choose among U links, a collective waits for the fullest link of all switches, which has more than
F ÷ U. The expected share F ÷ (U · most) follows from the binomial distribution of one link's
connections, links being taken as independent; a test holds it against flows that are routed.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from tutti.fabric.paths import FLOWLETS, PORT_TRIES
from tutti.hardware.fabric import Routing

_SIDES = 2  # a connection chooses its way up, and by that its way down
_FELT = 0.8  # of the variance of flowlets, as routed flows show
_LAST = 0.06  # of a switch's connections, as routed flows show: those that come to few empty ways
_MANY = 4096  # connections of a switch, from which on their number is rounded


def balance(
    routing: Routing, connections: int, transfers: float, links: int, switches: int = 1
) -> float:
    """Return the share of a bundle's rate that traffic gets on average, 0 to 1.

    `transfers` go up from each of `switches`, each as so many `connections`, over `links` each.
    """
    if routing is Routing.SPRAY or links < 2 or transfers <= 0:
        return 1.0
    flows = max(1, round(transfers * connections))
    if flows > _MANY:  # two digits tell enough
        digits = len(str(flows)) - 2
        flows = round(flows, -digits)
    return _balance(routing, connections, flows, links, max(1, switches))


@functools.lru_cache(maxsize=65536)
def _balance(routing: Routing, connections: int, flows: int, links: int, switches: int) -> float:
    even = flows / links
    if routing is Routing.SOURCE_PORT:
        return even / (math.ceil(even) + _unlucky(links, switches))
    if routing is Routing.ADAPTIVE:
        # the way up is the emptiest; the way down follows from it, unless a pair takes all ways
        all_ways = connections / (links * math.ceil(connections / links))
        return max(all_ways, even / _most_on_a_link(flows, links, switches * links))
    if routing is Routing.FLOWLET:
        # a connection's pieces share what there is: only their number's variance is felt
        return max(0.1, 1.0 - _FELT * (links - 1) / (flows * FLOWLETS) * _tail(switches * flows))
    return even / _most_on_a_link(flows, links, _SIDES * switches * links)


def _unlucky(links: int, switches: int) -> float:
    """Return how likely some connection finds no empty way among the ports that it tries."""
    none = (1.0 - 1.0 / links**2) ** PORT_TRIES
    return 1.0 - math.exp(-none * switches * _LAST)


def _most_on_a_link(flows: int, links: int, bins: int) -> float:
    """Return how many connections the fullest of so many links has, on average."""
    mean = flows / links
    reach = min(flows, int(mean + 12 * math.sqrt(mean)) + 24)
    counts = np.arange(reach + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, flows + 1)))])
    chosen = logs[flows] - logs[counts] - logs[flows - counts]
    share = 1.0 / links
    weights = np.exp(chosen + counts * math.log(share) + (flows - counts) * math.log1p(-share))
    below = np.minimum(np.cumsum(weights), 1.0)
    return float((1.0 - below**bins).sum())


def _tail(number: int) -> float:
    """Return how many deviations the largest of so many is above the mean, roughly."""
    return math.sqrt(2.0 * math.log(max(number, 2)))
