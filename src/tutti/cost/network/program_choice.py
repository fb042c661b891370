"""Which program a collective runs as: what each costs, and `choose_program`, which decides.

A step costs its start-up (α per round on the slowest kind of edge it uses) plus the most bytes
that any rank moves over a kind of edge ÷ the bandwidth there. Native links and NICs work at the
same time; rails and what crosses them leave by the same NIC. Chunks overlap the steps: the first
chunk passes all of them, the others follow at the pace of the slowest. `comm` executes, and the
simulator prices, what is chosen here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from tutti.collective import CollectiveProgram, Operation, algorithms, build
from tutti.collective.group import Edge, Group
from tutti.collective.layout import Layout
from tutti.collective.load import Load, load
from tutti.collective.program import Action
from tutti.cost.network.group_links import GroupLinks, Wire
from tutti.cost.network.program_rates import halved, halves, rated_price
from tutti.cost.network.tier_prices import Shares, StepPrices, tier_step_prices
from tutti.cost.network.tuned_programs import Tuned

CHUNKS = (1, 2, 4, 8, 16)  # that are priced, and measured
# Kinds of edges that share what leaves a chip: its native links, and its NIC.
_WAYS_OUT = ((Edge.ISLAND,), (Edge.RAIL, Edge.CROSS))
_LARGE = 256  # ranks, above which algorithms whose price takes long to find are left out
_TREES = frozenset({"tree", "double_tree"})
_SLOW_TO_PRICE = frozenset({"doubling", "double_tree", "direct", "tree"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What of the nominal links a software stack makes use of."""

    island: float = 0.8
    fabric: float = 0.75
    startup_s: float = 5e-6  # of one step inside an island
    hop_s: float = 5e-6  # of one round between islands, on top of the link's own latency


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A program that was chosen, with its price and those it was chosen over."""

    algorithm: str
    chunks: int
    seconds: float
    alternatives: tuple[tuple[str, int, float], ...] = ()


def program_seconds(
    program: CollectiveProgram, num_bytes: float, links: GroupLinks, efficiency: Efficiency
) -> float:
    """Return how long a program takes for `num_bytes` of whole buffer."""
    return _price(program, links, efficiency)(num_bytes, program.chunks)


@functools.lru_cache(maxsize=4096)
def _step_prices(
    program: CollectiveProgram, links: GroupLinks, efficiency: Efficiency
) -> StepPrices:
    """Return what each step costs per byte of the whole buffer, and to start."""
    if links.reach is not None:
        return _tier_prices(program, links, efficiency)
    # Loads are linear in the size, up to rounding: priced once at a size that divides well.
    layout = Layout.of(program, _sections(program))
    whole = layout.total
    prices: list[tuple[float, float]] = []
    carried = dict.fromkeys(_WAYS_OUT, 0.0)  # by all steps, which chunks run side by side
    apart = halved(program)
    index = 0
    for step in program.steps:
        loads = [load(apart, index + at, layout) for at in range(len(list(halves(step))))]
        index += len(loads)
        loaded = functools.reduce(Load.plus, loads)
        used = [edge for edge in Edge if loaded.uses(edge)]
        wires = {edge: _effective(links.wire(edge), edge, efficiency) for edge in used}
        per_byte = [0.0] * len(loads)
        for edges in _WAYS_OUT:
            each = {e: program.chunks / whole / wires[e].bandwidth for e in edges if e in wires}
            carried[edges] += loaded.busiest(each)
            per_byte = [max(a, b.busiest(each)) for a, b in zip(per_byte, loads, strict=True)]
        latency = max((wire.latency_s for wire in wires.values()), default=0.0)
        rounds = 1 if step.action is Action.EXCHANGE or used == [Edge.ISLAND] else loaded.rounds
        prices.append((sum(per_byte), latency * rounds))
    return StepPrices(tuple(prices), max(carried.values()))


def _tier_prices(
    program: CollectiveProgram, links: GroupLinks, efficiency: Efficiency
) -> StepPrices:
    """Return the steps' prices where tiers limit what crosses them."""
    assert links.reach is not None
    wires = dict(links.wires)
    inside = wires[Edge.ISLAND].latency_s if Edge.ISLAND in wires else 0.0
    between = max((w.latency_s for edge, w in links.wires if edge is not Edge.ISLAND), default=0.0)
    shares = Shares(
        inside=efficiency.island,
        outside=efficiency.fabric,
        inside_start_s=inside + efficiency.startup_s,
        outside_start_s=between + efficiency.hop_s,
    )
    return tier_step_prices(program, links.reach, shares)


def _sections(program: CollectiveProgram) -> int:
    return 5040 * max(1, program.group.size) * program.chunks


def _effective(wire: Wire, edge: Edge, efficiency: Efficiency) -> Wire:
    inside = edge is Edge.ISLAND
    share = efficiency.island if inside else efficiency.fabric
    extra = efficiency.startup_s if inside else efficiency.hop_s
    return Wire(latency_s=wire.latency_s + extra, bandwidth=wire.bandwidth * share)


def candidates(operation: Operation, group: Group) -> tuple[str, ...]:
    """Return the algorithms worth pricing for a group."""
    known = algorithms(operation, group)
    if group.size <= _LARGE:
        return known
    return tuple(name for name in known if name not in _SLOW_TO_PRICE)


@functools.lru_cache(maxsize=16384)
def choose_program(
    operation: Operation,
    num_bytes: float,
    links: GroupLinks,
    efficiency: Efficiency,
    *,
    tuned: Tuned | None = None,
) -> Choice:
    """Return the cheapest program for an operation on `num_bytes` of whole buffer.

    A native collective is possible only inside one island. `tuned` holds measured times, which
    count where a program was measured near this size.
    """
    group = links.group
    if group.size == 1 or num_bytes <= 0:
        return Choice(algorithm="none", chunks=1, seconds=0.0)
    priced: list[tuple[float, str, int]] = []
    for name in candidates(operation, group):
        if name == "proportional" and links.reach is not None and _is_many(group):
            continue  # equal islands: what the hierarchical one does, and long to price
        if name == "native" and len(group.islands) > 1:
            continue
        price = _price(_build(operation, name, group), links, efficiency)
        priced += [
            (price(num_bytes, chunks), name, chunks)
            for chunks in (CHUNKS if len(group.islands) > 1 else (1,))
        ]
    if tuned is not None:
        priced = tuned.corrected(operation, group, num_bytes, priced)
    # what costs the same is left to the island's own library, or to what waits for no parent
    priced.sort(key=lambda one: (one[0], one[1] != "native", one[1] in _TREES, *one[1:]))
    seconds, name, chunks = priced[0]
    best: dict[str, tuple[str, int, float]] = {}
    for other_seconds, other, other_chunks in priced:
        best.setdefault(other, (other, other_chunks, other_seconds))
    return Choice(algorithm=name, chunks=chunks, seconds=seconds, alternatives=tuple(best.values()))


def _is_many(group: Group) -> bool:
    return group.size > _LARGE and group.is_regular


def price_named(
    operation: Operation,
    num_bytes: float,
    links: GroupLinks,
    efficiency: Efficiency,
    algorithm: str,
    chunks: int,
) -> Choice:
    """Return the price of a program that was chosen before."""
    group = links.group
    if group.size == 1 or num_bytes <= 0:
        return Choice(algorithm="none", chunks=1, seconds=0.0)
    price = _price(_build(operation, algorithm, group), links, efficiency)
    return Choice(algorithm=algorithm, chunks=chunks, seconds=price(num_bytes, chunks))


def _price(
    program: CollectiveProgram, links: GroupLinks, efficiency: Efficiency
) -> Callable[[float, int], float]:
    """Return the seconds of a program as a function of bytes and chunks."""
    if links.rates and links.group.size <= _LARGE:
        return rated_price(program, links).seconds
    return _step_prices(program, links, efficiency).seconds


@functools.lru_cache(maxsize=4096)
def _build(operation: Operation, name: str, group: Group) -> CollectiveProgram:
    needs_root = operation in (
        Operation.BROADCAST,
        Operation.REDUCE,
        Operation.GATHER,
        Operation.SCATTER,
    )
    root = group.ranks[0] if needs_root else None
    return build(operation, name, group, root=root)
