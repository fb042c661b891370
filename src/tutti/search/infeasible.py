"""Where nothing fits: what is tightest, by how much, and the smallest change that would help."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tutti.errors import InputError
from tutti.search.result import Settled
from tutti.search.space import ALL_OFFLOAD, ALL_RECOMPUTE, Problem
from tutti.search.tables import Tables
from tutti.units import bytes_text, many

Fit = Callable[[Problem], Settled | None]


def explain_infeasible(tables: Tables, first_fit: Fit) -> InputError:
    """Return the error that names the tightest constraint and the smallest remedy."""
    problem = tables.problem
    tightest = _too_much_state(problem)
    if not tightest:
        free = first_fit(replace(problem, unlimited_memory=True))
        if free is None:
            return InputError(_nothing_divides(problem))
        most = free.estimate.tightest
        tightest = (
            f"even the best strategy without a memory limit needs {bytes_text(most.total)} of the "
            f"{bytes_text(most.limit)} of a chip of '{most.pool}' ({most.name})"
        )
    remedy = next(
        (words for words, changed in _remedies(problem) if first_fit(changed) is not None),
        "neither fewer constraints nor a shorter sequence nor more nodes (as far as they were "
        "tried) would do; choose a smaller model or chips with more memory",
    )
    return InputError(
        f"{problem.model.name} does not fit on '{problem.cluster.name}': {tightest}; "
        f"smallest change that fits: {remedy}"
    )


def _too_much_state(problem: Problem) -> str:
    """Say so where parameters and what trains them exceed all memory, however they are shared."""
    precision = problem.job.precision
    held = [precision.parameters, precision.gradients, precision.moments, precision.moments]
    if precision.master is not None:
        held.append(precision.master)
    states = problem.model.num_parameters * sum(dtype.num_bytes for dtype in held)
    chips = sum(pool.num_chips * pool.chip.memory_bytes for pool in problem.pools)
    hosts = 0.0
    if problem.space.offload:
        hosts = sum(pool.nodes * pool.node.host.memory_bytes for pool in problem.pools)
    if states <= chips + hosts:
        return ""
    beside = f" and {bytes_text(hosts)} on their hosts" if hosts else ""
    have = "has" if problem.num_chips == 1 else "have"
    return (
        f"its parameters, gradients and optimizer states are {bytes_text(states)}, the "
        f"{many(problem.num_chips, 'chip')} {have} {bytes_text(chips)}{beside}"
    )


def _nothing_divides(problem: Problem) -> str:
    space, job = problem.space, problem.job
    least = min(problem.sequence_counts())
    if least > job.global_batch:
        return (
            f"global batch {job.global_batch} is smaller than a micro-batch of {least}; "
            f"say --global-batch {least} or a smaller --micro-batch"
        )
    if not space.schedules or not space.shard or not space.recompute:
        return "the constraints leave no schedule, shard level or recomputation to choose from"
    return (
        f"no strategy divides {many(job.global_batch, 'sequence')} over "
        f"{many(problem.cluster.num_chips, 'chip')} "
        "under the given constraints; loosen --tp-max, --max-stages or --micro-batch"
    )


def _remedies(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Yield changes, the least painful first."""
    space = problem.space
    if set(space.recompute) != set(ALL_RECOMPUTE):
        yield "allow recomputation", replace(problem, space=replace(space, recompute=ALL_RECOMPUTE))
    if set(space.shard) != {0, 1, 2, 3}:
        wider = replace(space, shard=(0, 1, 2, 3))
        yield "allow shard levels 0-3", replace(problem, space=wider)
    if set(space.offload) != set(ALL_OFFLOAD):
        yield "allow offload", replace(problem, space=replace(space, offload=ALL_OFFLOAD))
    everything = replace(
        space, recompute=ALL_RECOMPUTE, shard=(0, 1, 2, 3), offload=ALL_OFFLOAD,
        tp=None, cp=None, sequences=None, max_stages=None,
    )  # fmt: skip
    if everything != space:
        yield "lift the constraints on the strategy", replace(problem, space=everything)
    if space.pools is not None and len(problem.pools) < len(problem.cluster.pools):
        yield "use all pools", replace(problem, space=replace(everything, pools=None))
    if problem.job.sequence_length > 1:
        shorter = replace(problem.job, sequence_length=problem.job.sequence_length // 2)
        words = f"--sequence-length {shorter.sequence_length}"
        yield words, replace(problem, job=shorter, space=everything)
    for factor in (2, 4, 8):
        try:
            pools = tuple(
                replace(pool, nodes=pool.nodes * factor) for pool in problem.cluster.pools
            )
        except ValueError:  # nodes without NICs stay alone
            return
        more = replace(problem.cluster, pools=pools)
        yield (
            f"{factor} times as many nodes ({more.num_chips} chips)",
            replace(problem, cluster=more, space=everything),
        )
