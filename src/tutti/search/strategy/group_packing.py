"""Packing: which groups of nodes hold which copies, so that least crosses a fabric's tiers.

A *block* is what talks most among itself: the copies of a stage (gradients) or the stages of a copy
(boundaries). Blocks are packed largest first, each into the tightest group of nodes that holds it
whole, else into the fewest groups of the tightest part of the fabric that does. Then pairs of
copies change places as long as fewer bytes cross. Nothing is priced here.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tutti.hardware.cluster import Cluster
from tutti.hardware.leaves import group_of
from tutti.hardware.pool import Pool
from tutti.hardware.topology import Position

Path = tuple[Hashable, ...]  # the groups that hold a node, from the top tier down to the leaves
MOST_SWAPPED = 64  # copies, up to which pairs are looked at
_PASSES = 3  # over all pairs


@dataclass(frozen=True, slots=True)
class Request:
    """One copy of a replica: chips of a pool, for a stage of a pipeline."""

    block: Hashable
    stage: tuple[int, int]  # pipeline, stage
    pool: str
    width: int


@dataclass(frozen=True, slots=True)
class Weights:
    """What crosses a tier when copies are apart: bytes of a step."""

    gradients: Mapping[tuple[int, int], float]  # per stage, for every further group that it spans
    boundaries: Mapping[tuple[int, int], float]  # per copy of a stage, to the next stage


class IslandAllocator:
    """Hands out chips of some nodes of a pool, islands in order, so that groups stay in one."""

    def __init__(self, pool: Pool, nodes: Sequence[int] | None = None) -> None:
        node = pool.node
        islands = [list(island.slots) for island in node.islands]
        covered = {slot for island in islands for slot in island}
        alone = [slot for slot in range(node.num_chips) if slot not in covered]
        islands += [alone] if alone else []
        self._free: list[list[Position]] = [
            [Position(pool.name, n, slot) for slot in island]
            for n in (range(pool.nodes) if nodes is None else nodes)
            for island in sorted(islands)
        ]
        self._widest = max(map(len, islands))
        self._first = 0

    def take(self, width: int) -> list[Position]:
        """Return `width` chips of one island, of neighbouring islands where none is wide enough."""
        while self._first < len(self._free) and not self._free[self._first]:
            self._first += 1
        for index in range(self._first, len(self._free)):
            island = self._free[index]
            if len(island) >= width:
                taken, self._free[index] = island[:width], island[width:]
                return taken
        taken = []
        for index in range(self._first, len(self._free)):
            need = width - len(taken)
            taken += self._free[index][:need]
            self._free[index] = self._free[index][need:]
            if len(taken) == width:
                return taken
        raise ValueError(f"{width} more chips than the pool has")

    def room(self, width: int) -> int:
        """Return how many copies of a width fit, none of them cut without need."""
        if width > self._widest:
            return self.free // width
        return sum(len(island) // width for island in self._free)

    @property
    def free(self) -> int:
        """Chips that are left."""
        return sum(map(len, self._free))

    def rest(self) -> list[Position]:
        """Return the chips that nobody took."""
        return [chip for island in self._free for chip in island]


def node_paths(cluster: Cluster, pool: Pool) -> list[Path]:
    """Return the groups that hold each node of a pool, from the top down."""
    own = "" if len(pool.leaves) else pool.name
    tiers = range(len(cluster.fabric.tiers) - 2, -1, -1)
    return [
        tuple((own, group_of(cluster.fabric, pool, node, tier)) for tier in tiers)
        for node in range(pool.nodes)
    ]


def pack(
    requests: Sequence[Request], cluster: Cluster, weights: Weights
) -> tuple[list[list[Position]], list[Position]]:
    """Return the chips of every request, and those that are left."""
    places: list[list[Position]] = [[] for _ in requests]
    rest: list[Position] = []
    for pool in cluster.pools:
        own = [number for number, one in enumerate(requests) if one.pool == pool.name]
        left = _pack_pool(pool, cluster, requests, own, places)
        rest += left
    _swap(requests, places, cluster, weights)
    return places, rest


def _pack_pool(
    pool: Pool,
    cluster: Cluster,
    requests: Sequence[Request],
    own: Sequence[int],
    places: list[list[Position]],
) -> list[Position]:
    by_path: dict[Path, list[int]] = defaultdict(list)
    for node, path in enumerate(node_paths(cluster, pool)):
        by_path[path].append(node)
    groups = {path: IslandAllocator(pool, nodes) for path, nodes in by_path.items()}
    blocks: dict[Hashable, list[int]] = defaultdict(list)
    for number in own:
        blocks[requests[number].block].append(number)
    size = {name: sum(requests[i].width for i in block) for name, block in blocks.items()}
    for name in sorted(blocks, key=lambda name: -size[name]):
        order = list(_order(groups, list(groups), size[name], 0))
        for number in blocks[name]:
            width = requests[number].width
            roomy = next((path for path in order if groups[path].room(width)), None)
            if roomy is None:  # only pieces are left: from wherever most are
                roomy = max(order, key=lambda path: groups[path].free)
            if groups[roomy].free < width:
                places[number] = _pieces(groups, order, width)
            else:
                places[number] = groups[roomy].take(width)
    return [chip for path in sorted(groups, key=str) for chip in groups[path].rest()]


def _pieces(
    groups: Mapping[Path, IslandAllocator], order: Sequence[Path], width: int
) -> list[Position]:
    taken: list[Position] = []
    for path in order:
        taken += groups[path].take(min(width - len(taken), groups[path].free))
    if len(taken) < width:
        raise ValueError(f"{width} more chips than the pool has")
    return taken


def _order(
    groups: Mapping[Path, IslandAllocator], paths: Sequence[Path], need: int, depth: int
) -> Iterator[Path]:
    """Yield groups as a block takes them: the tightest part that holds it whole comes first."""
    if len(paths) <= 1 or depth >= len(paths[0]):
        yield from paths
        return
    parts: dict[Hashable, list[Path]] = defaultdict(list)
    for path in paths:
        parts[path[depth]].append(path)
    free = {part: sum(groups[path].free for path in own) for part, own in parts.items()}
    # parts that hold it first, the tightest before the others; else the emptiest first
    for part in sorted(
        parts, key=lambda p: (free[p] < need, free[p] if free[p] >= need else -free[p])
    ):
        yield from _order(groups, parts[part], need, depth + 1)


# --- swaps -------------------------------------------------------------------------------------


class _Crossing:
    """Bytes that cross tiers, stage by stage."""

    def __init__(
        self, requests: Sequence[Request], places: Sequence[Path], weights: Weights
    ) -> None:
        self.places = list(places)
        self._weights = weights
        self._stages: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, one in enumerate(requests):
            self._stages[one.stage].append(number)

    def of(self, stages: set[tuple[int, int]]) -> float:
        """Return what some stages, and the boundaries beside them, send across tiers."""
        total = 0.0
        for stage in stages:
            own = [self.places[i] for i in self._stages[stage]]
            spans = sum(len({path[: d + 1] for path in own}) - 1 for d in range(len(own[0])))
            total += spans * self._weights.gradients.get(stage, 0.0)
        wires = {(p, s - 1) for p, s in stages} | stages
        return total + sum(self._boundary(p, s) for p, s in wires)

    def _boundary(self, pipeline: int, stage: int) -> float:
        here, there = (self._stages.get((pipeline, s), []) for s in (stage, stage + 1))
        if not here or not there:
            return 0.0
        apart = 0
        for at, number in enumerate(here):
            path, other = self.places[number], self.places[there[at * len(there) // len(here)]]
            apart += sum(a != b for a, b in zip(path, other, strict=False))
        return apart * self._weights.boundaries.get((pipeline, stage), 0.0)


def _swap(
    requests: Sequence[Request],
    chips: list[list[Position]],
    cluster: Cluster,
    weights: Weights,
) -> None:
    """Let pairs of copies change places while fewer bytes cross."""
    if len(requests) > MOST_SWAPPED:
        return
    paths = {pool.name: node_paths(cluster, pool) for pool in cluster.pools}
    crossing = _Crossing(requests, [paths[c[0].pool][c[0].node] for c in chips], weights)
    for _ in range(_PASSES):
        better = False
        for a, b in itertools.combinations(range(len(requests)), 2):
            one, two, places = requests[a], requests[b], crossing.places
            if places[a] == places[b] or (one.pool, one.width) != (two.pool, two.width):
                continue
            touched = {one.stage, two.stage}
            before = crossing.of(touched)
            places[a], places[b] = places[b], places[a]
            if crossing.of(touched) < before * (1 - 1e-9):
                chips[a], chips[b] = chips[b], chips[a]
                better = True
            else:
                places[a], places[b] = places[b], places[a]
        if not better:
            return
