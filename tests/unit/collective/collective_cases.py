"""Random groups, random calls, and what a collective must give, computed the plain way."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import strategies as st

from tutti.collective import CollectiveProgram, Group, Island, Operation, Pattern, build
from tutti.collective.builder import CATALOG

EVERY = [(operation, name) for operation in Operation for name in CATALOG[operation]]
ACROSS = {
    ("all_reduce", "hierarchical"): ["ring", "doubling", "direct", "tree", "binary"],
    ("all_reduce", "leader"): ["ring", "doubling", "direct", "tree", "binary"],
    ("reduce_scatter", "hierarchical"): ["ring", "doubling", "direct"],
    ("reduce_scatter", "leader"): ["ring", "doubling", "direct"],
    ("all_gather", "hierarchical"): ["ring", "doubling", "direct"],
    ("all_gather", "leader"): ["ring", "doubling", "direct"],
    ("broadcast", "scatter_gather"): ["ring", "doubling", "direct"],
    ("broadcast", "hierarchical"): ["tree", "binary", "ring", "direct"],
    ("broadcast", "leader"): ["tree", "binary", "ring", "direct"],
    ("reduce", "hierarchical"): ["tree", "binary", "ring", "direct"],
    ("reduce", "leader"): ["tree", "binary", "ring", "direct"],
    ("gather", "leader"): ["tree", "direct"],
    ("scatter", "leader"): ["tree", "direct"],
    ("barrier", "leader"): ["tree", "binary"],
}


@st.composite
def islands_of(draw: st.DrawFn, ranks: tuple[int, ...]) -> Island:
    size = len(ranks)
    rails = draw(st.one_of(st.just(()), st.tuples(*[st.integers(0, 4)] * size)))
    weights = st.tuples(*[st.sampled_from([0.0, 0.5, 1.0, 3.0, 4.0])] * size).filter(any)
    return Island(ranks=ranks, rails=rails, bandwidths=draw(st.one_of(st.just(()), weights)))


@st.composite
def groups(draw: st.DrawFn, most: int = 12, most_islands: int = 5) -> Group:
    """One to five islands, unequal or equal, plain or with rails and NICs, ranks scattered."""
    if draw(st.booleans()):
        number = draw(st.integers(1, min(most_islands, most)))
        sizes = [draw(st.integers(1, most // number))] * number
    else:
        sizes = draw(
            st.lists(st.integers(1, 5), min_size=1, max_size=most_islands).filter(
                lambda found: sum(found) <= most
            )
        )
    total = sum(sizes)
    scattered = draw(st.permutations(range(total)))
    factor = draw(st.sampled_from([1, 1, 3]))
    ranks = list(range(total)) if draw(st.booleans()) else [r * factor for r in scattered]
    found, at = [], 0
    decorated = draw(st.booleans())
    for size in sizes:
        own = tuple(ranks[at : at + size])
        found.append(draw(islands_of(own)) if decorated else Island(ranks=own))
        at += size
    return Group(tuple(found))


@dataclasses.dataclass(frozen=True)
class Call:
    program: CollectiveProgram
    counts: int | tuple[int, ...]

    def inputs(self, dtype: type = np.int64) -> dict[int, np.ndarray]:
        random = np.random.default_rng(7)
        found = {}
        for rank in sorted(self.program.group.ranks):
            size = self._input_size(rank)
            values = random.integers(-(1 << 40), 1 << 40, size)
            found[rank] = values.astype(dtype) / 3 if dtype is not np.int64 else values
        return {rank: values.astype(dtype) for rank, values in found.items()}

    def section_counts(self, number: int) -> list[int]:
        if isinstance(self.counts, int):
            return [self.counts] * number
        return list(self.counts)

    def _input_size(self, rank: int) -> int:
        program, group = self.program, self.program.group
        ranks = sorted(group.ranks)
        size, at = len(ranks), ranks.index(rank)
        is_root = program.root is not None and group.ranks[program.root] == rank
        match program.operation:
            case Operation.BARRIER:
                return 1
            case Operation.ALL_REDUCE | Operation.REDUCE:
                return self.section_counts(1)[0]
            case Operation.BROADCAST:
                return self.section_counts(1)[0] if is_root else 0
            case Operation.REDUCE_SCATTER:
                return sum(self.section_counts(size))
            case Operation.SCATTER:
                return sum(self.section_counts(size)) if is_root else 0
            case Operation.ALL_GATHER | Operation.GATHER:
                return self.section_counts(size)[at]
            case Operation.ALL_TO_ALL:
                return sum(self.section_counts(size * size)[at * size : (at + 1) * size])
            case Operation.SEND_RECEIVE:
                counts = self.section_counts(len(program.messages))
                sources = [group.ranks[source] for source, _ in program.messages]
                return sum(c for c, source in zip(counts, sources, strict=True) if source == rank)

    def expected(self, inputs: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        """The plain result, written without any of the package's own notions."""
        program, group = self.program, self.program.group
        ranks = sorted(group.ranks)
        size = len(ranks)
        root = None if program.root is None else group.ranks[program.root]
        nothing = np.zeros(0, inputs[ranks[0]].dtype)
        match program.operation:
            case Operation.ALL_REDUCE | Operation.BARRIER:
                return dict.fromkeys(ranks, np.sum([inputs[r] for r in ranks], axis=0))
            case Operation.REDUCE:
                total = np.sum([inputs[r] for r in ranks], axis=0)
                return {r: total if r == root else nothing for r in ranks}
            case Operation.BROADCAST:
                return dict.fromkeys(ranks, inputs[root])
            case Operation.REDUCE_SCATTER:
                total = np.sum([inputs[r] for r in ranks], axis=0)
                return dict(zip(ranks, split(total, self.section_counts(size)), strict=True))
            case Operation.SCATTER:
                return dict(zip(ranks, split(inputs[root], self.section_counts(size)), strict=True))
            case Operation.ALL_GATHER:
                return dict.fromkeys(ranks, np.concatenate([inputs[r] for r in ranks]))
            case Operation.GATHER:
                total = np.concatenate([inputs[r] for r in ranks])
                return {r: total if r == root else nothing for r in ranks}
            case Operation.ALL_TO_ALL:
                counts = self.section_counts(size * size)
                rows = [
                    split(inputs[r], counts[i * size : (i + 1) * size]) for i, r in enumerate(ranks)
                ]
                return {r: np.concatenate([row[j] for row in rows]) for j, r in enumerate(ranks)}
            case Operation.SEND_RECEIVE:
                return self._delivered(inputs, nothing)

    def _delivered(
        self, inputs: dict[int, np.ndarray], nothing: np.ndarray
    ) -> dict[int, np.ndarray]:
        group, messages = self.program.group, self.program.messages
        at = dict.fromkeys(group.ranks, 0)
        found = {rank: [nothing] for rank in group.ranks}
        for count, (s, t) in zip(self.section_counts(len(messages)), messages, strict=True):
            source, target = group.ranks[s], group.ranks[t]
            found[target].append(inputs[source][at[source] : at[source] + count])
            at[source] += count
        return {rank: np.concatenate(pieces) for rank, pieces in found.items()}


def split(values: np.ndarray, counts: list[int]) -> list[np.ndarray]:
    return np.split(values, np.cumsum(counts)[:-1])


SIZES = st.one_of(st.sampled_from([0, 1, 2, 3]), st.integers(0, 40))


@st.composite
def programs(
    draw: st.DrawFn,
    operation: Operation,
    algorithm: str,
    group: st.SearchStrategy[Group] | None = None,
) -> CollectiveProgram:
    group = draw(group if group is not None else groups())
    if algorithm == "native" and len(group.islands) > 1:
        group = Group.of([group.ranks])
    ranks = st.sampled_from(group.ranks)
    is_batch = operation is Operation.SEND_RECEIVE
    across = [None, *ACROSS.get((operation.value, algorithm), [])]
    return build(
        operation,
        algorithm,
        group,
        root=draw(ranks) if operation.has_root else None,
        messages=draw(st.lists(st.tuples(ranks, ranks), max_size=8)) if is_batch else (),
        across=draw(st.sampled_from(across)),
        order=draw(st.one_of(st.none(), st.permutations(group.ranks))),
        chunks=draw(st.integers(1, 3)),
        connections=draw(st.integers(1, 2)),
    )


@st.composite
def calls(
    draw: st.DrawFn,
    operation: Operation,
    algorithm: str,
    group: st.SearchStrategy[Group] | None = None,
) -> Call:
    program = draw(programs(operation, algorithm, group))
    size = program.group.size
    number = {
        Operation.REDUCE_SCATTER: size,
        Operation.ALL_GATHER: size,
        Operation.GATHER: size,
        Operation.SCATTER: size,
        Operation.ALL_TO_ALL: size * size,
        Operation.SEND_RECEIVE: len(program.messages),
    }.get(operation, 1)
    if draw(st.booleans()):
        return Call(program, draw(SIZES))
    lengths = st.integers(0, 9)
    return Call(program, tuple(draw(st.lists(lengths, min_size=number, max_size=number))))


__all__ = ["EVERY", "Call", "Pattern", "calls", "groups", "programs", "split"]
