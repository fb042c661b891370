"""`tutti bench fabric prices`: prices of collective programs against their replay, flow by flow.

On every example cluster groups of several forms are priced as plans are: one chip of each node
with its neighbours in groups of their own, one chip of each island, and whole pools. Every program
is replayed on the wiring with the same efficiencies; what was chosen is held against the best
replayed one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tutti.hardware.cluster import Cluster
from tutti.hardware.pool import Pool
from tutti.hardware.topology import Position

if TYPE_CHECKING:
    from rich.table import Table

    from tutti.collective import Operation
    from tutti.cost.network.group_links import GroupLinks
    from tutti.fabric.wiring import Wiring

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
SIZES = (16e6, 1e9)
MOST_RANKS = 256  # of a group: larger ones are priced by fewer programs
ALLOWED = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceRow:
    """One collective on one group: what was chosen, priced and replayed."""

    cluster: str
    group: str
    ranks: int
    groups: int
    operation: str
    num_bytes: float
    chosen: str
    chunks: int
    priced_s: float
    replayed_s: float
    best: str
    best_s: float

    @property
    def price_error(self) -> float:
        """Priced over replayed, less one."""
        return self.priced_s / self.replayed_s - 1

    @property
    def choice_loss(self) -> float:
        """How much longer the choice takes than the best."""
        return self.replayed_s / self.best_s - 1


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    groups: list[list[Position]]


def _cases(cluster: Cluster) -> Iterator[_Case]:
    for pool in cluster.pools:
        slots = range(pool.node.num_chips)
        nodes = range(min(pool.nodes, MOST_RANKS))
        if pool.nodes > 1:
            yield _Case(
                f"one chip of each node of {pool.name}",
                [[Position(pool.name, n, s) for n in nodes] for s in slots],
            )
        if len(pool.node.islands) > 1:
            yield _of_islands(pool)
        few = range(min(pool.nodes, max(1, MOST_RANKS // pool.node.num_chips)))
        if pool.num_chips > 1:
            whole = [Position(pool.name, n, s) for n in few for s in slots]
            yield _Case(f"all of {pool.name}", [whole])
    if len(cluster.pools) > 1 and cluster.num_nodes <= MOST_RANKS:
        width = min(pool.node.num_chips for pool in cluster.pools)
        yield _Case("one chip of each node", [
            [Position(pool.name, n, s) for pool in cluster.pools for n in range(pool.nodes)]
            for s in range(width)
        ])  # fmt: skip


def _of_islands(pool: Pool) -> _Case:
    """Return the groups of copies that fill an island each: one chip of every island."""
    islands = [list(island.slots) for island in pool.node.islands]
    nodes = range(min(pool.nodes, MOST_RANKS // len(islands)))
    return _Case(f"one chip of each island of {pool.name}", [
        [Position(pool.name, n, island[at]) for n in nodes for island in islands]
        for at in range(min(map(len, islands)))
    ])  # fmt: skip


def price_rows(
    cluster: Cluster,
    operations: Sequence[str] = OPERATIONS,
    sizes: Sequence[float] = SIZES,
) -> list[PriceRow]:
    """Return how prices and choices stand on one cluster."""
    from tutti.collective import Operation
    from tutti.cost.network.group_links import group_links
    from tutti.cost.network.reach import group_limits
    from tutti.fabric.wiring import wire
    from tutti.plan.chips import ChipSet

    wiring, limits = wire(cluster), group_limits(cluster)
    rows: list[PriceRow] = []
    for case in _cases(cluster):
        parties = [[ChipSet.from_ids(chips)] for chips in case.groups]
        crossers = None if limits is None else limits.crossers(parties)
        links = group_links(cluster, case.groups[0], crossers)
        rows += [
            _row(case, links, wiring, Operation(operation), size)
            for operation in operations
            for size in sizes
        ]
    return rows


def _row(
    case: _Case, links: GroupLinks, wiring: Wiring, operation: Operation, size: float
) -> PriceRow:
    from tutti.cost.network.program_choice import Efficiency, choose_program

    efficiency = Efficiency()
    choice = choose_program(operation, size, links, efficiency)
    replayed = {
        (name, chunks): _replayed(case, links, wiring, operation, size, name, chunks)
        for name, chunks, _ in choice.alternatives
    }
    best = min(replayed, key=lambda key: replayed[key])
    return PriceRow(
        cluster=wiring.cluster.name, group=case.name, ranks=links.group.size,
        groups=len(case.groups), operation=operation.value, num_bytes=size,
        chosen=choice.algorithm, chunks=choice.chunks, priced_s=choice.seconds,
        replayed_s=replayed[choice.algorithm, choice.chunks], best=best[0],
        best_s=replayed[best],
    )  # fmt: skip


def _replayed(
    case: _Case, links: GroupLinks, wiring: Wiring, operation: Operation, size: float,
    name: str, chunks: int,
) -> float:  # fmt: skip
    from dataclasses import replace

    from tutti.collective import build
    from tutti.cost.network.program_choice import Efficiency
    from tutti.fabric.replay import replay

    efficiency = Efficiency()
    program = replace(build(operation, name, links.group), chunks=chunks)
    return replay(
        program, case.groups[0], wiring, size, efficiency=efficiency.fabric,
        inside=efficiency.island, hop_s=efficiency.hop_s, beside=case.groups[1:],
    ).seconds  # fmt: skip


def price_table(rows: Sequence[PriceRow], most: int) -> Table:
    """Return at most so many rows as a table, the worst first."""
    from rich import box
    from rich.table import Table

    from tutti.units import bytes_text, seconds_text

    table = Table(box=box.SIMPLE)
    for name in ("cluster", "group", "collective", "bytes", "chosen", "priced", "replayed",
                 "error", "best", "replayed", "loss"):  # fmt: skip
        text = name in ("cluster", "group", "collective", "chosen", "best")
        table.add_column(name, justify="left" if text else "right")
    worst = sorted(rows, key=lambda row: -max(row.choice_loss, abs(row.price_error)))
    for row in worst[:most]:
        table.add_row(
            row.cluster, f"{row.groups} × {row.ranks}: {row.group}", row.operation,
            bytes_text(row.num_bytes), row.chosen, seconds_text(row.priced_s),
            seconds_text(row.replayed_s), f"{100 * row.price_error:+.1f} %", row.best,
            seconds_text(row.best_s), f"{100 * row.choice_loss:.1f} %",
        )  # fmt: skip
    return table
