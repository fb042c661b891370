"""What smaller questions find, as strategies of the larger one: more is never worse.

A question with fewer chips, less memory, slower links or a narrower space has answers that are
strategies of the larger question, too. Where the gap to the bound is wide, each is asked with
little work, and what it finds is simulated for the larger question: the coarse model, which keeps a
few of very many, keeps others there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tutti.hardware.cluster import Cluster
from tutti.search.candidate_loop import Search
from tutti.search.pricing.simulate_draft import SimulatedDraft
from tutti.search.pricing.unit_tables import Tables
from tutti.search.question.space import Space
from tutti.search.thresholds import THRESHOLDS


def take_smaller(search: Search) -> None:
    """Simulate what smaller questions find, where that is worth its work."""
    best, effort = search.ranked.best, search.effort
    if best is None or not search.bound or search.per_second is not None:
        return
    if not effort.smaller or effort.seeds:
        return
    few_chips = search.problem.num_chips < effort.large
    if not few_chips or not effort.is_wide(best.seconds, search.bound):
        return
    few = replace(
        effort, whole=1, candidates=effort.smaller, most_candidates=2 * effort.smaller, improved=1,
        instructions=effort.instructions // 4, per_chip=effort.per_chip // 4,
    )  # fmt: skip
    deepest = max(len(pipeline.stages) for pipeline in best.draft.pipelines)
    try:
        for name, tables in smaller_questions(search.tables, deepest):
            smaller = Search(tables, few)
            if tables.problem.cluster is search.problem.cluster:
                smaller.simulator.memo = search.simulator.memo
            _take_found(search, name, smaller.run().drafts[: few.smaller])
            if smaller.interrupted:
                search.interrupted = True
                return
    except KeyboardInterrupt:
        search.interrupted = True


def _take_found(search: Search, name: str, found: Sequence[SimulatedDraft]) -> None:
    known = {ranked.draft for ranked in search.ranked.drafts}
    for number, smaller in enumerate(found):
        best = search.ranked.best
        assert best is not None
        if smaller.draft in known:
            continue
        if smaller.seconds > THRESHOLDS.explored_within * best.seconds:
            return
        simulated = search.simulator.quick(smaller.draft)
        if simulated.fits:
            search.take(simulated, (name, number))


def smaller_questions(tables: Tables, deepest: int) -> Iterator[tuple[str, Tables]]:
    """Yield smaller questions by name, each with its tables; `deepest` are the best plan's stages.

    Schedules and shard levels are no such parts: the coarse model keeps some chains of each.
    """
    problem, space = tables.problem, tables.problem.space
    fewest = tuple(degree for degree in space.tp or (1, 2) if degree <= 2)
    parts: list[tuple[str, Space]] = []
    if fewest:
        parts.append(("tp ≤ 2", replace(space, tp=fewest)))
    if space.cp is None or 1 in space.cp:
        parts.append(("cp = 1", replace(space, cp=(1,))))
    if deepest > 1:
        parts.append(("half as many stages", replace(space, max_stages=deepest // 2)))
    names = [pool.name for pool in problem.pools]
    if len(names) > 1 and space.idle:
        for name in names:
            others = tuple(other for other in names if other != name)
            parts.append((f"without {name}", replace(space, pools=others)))
    for name, part in parts:
        if part != space:
            yield name, tables.for_problem(replace(problem, space=part))
    if not problem.unlimited_memory:
        yield "less memory", Tables(replace(problem, cluster=_less_memory(problem.cluster)))


def _less_memory(cluster: Cluster) -> Cluster:
    pools = []
    for pool in cluster.pools:
        chip = pool.node.chip
        least = replace(chip, memory_bytes=THRESHOLDS.less_memory * chip.memory_bytes)
        pools.append(replace(pool, node=replace(pool.node, chip=least)))
    return replace(cluster, pools=tuple(pools))
