"""Where nothing fits: what is tightest, by how much, and the cheapest change that would help."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from tutti.errors import InputError
from tutti.models.tuning import BASE_BYTES
from tutti.plan.job import PRECISIONS, Precision
from tutti.search.answer.result import ProvenPlan
from tutti.search.pricing.unit_tables import Tables
from tutti.search.question.space import ALL_OFFLOAD, ALL_RECOMPUTE, Problem, Space
from tutti.search.thresholds import THRESHOLDS
from tutti.units import bytes_text, many

Fit = Callable[[Problem], ProvenPlan | None]


def explain_infeasible(tables: Tables, first_fit: Fit) -> InputError:
    """Return the error that names the tightest constraint and the cheapest remedy."""
    problem = tables.problem
    tightest = _too_much_state(problem) or _least_needed(problem, first_fit)
    if not tightest:
        return InputError(_nothing_divides(problem))
    remedy = next(
        (
            f"cheapest change that fits: {words}"
            for words, changed in _remedies(problem)
            if first_fit(changed) is not None
        ),
        "no change that was tried fits (fewer constraints, 16-bit states, a shorter sequence, more "
        "nodes); choose a smaller model or chips with more memory",
    )
    return InputError(
        f"{problem.model.name} does not fit on '{problem.cluster.name}': {tightest}; {remedy}"
    )


def _least_needed(problem: Problem, first_fit: Fit) -> str:
    """Say how much memory the most frugal plan takes that was found; "" where there is none.

    Chips are given ever more memory until something fits; then it is looked for in between.
    """
    low, high, least = 1.0, 2.0, None
    while least is None and high <= THRESHOLDS.most_memory:
        least = first_fit(_with_memory(problem, high))
        low, high = (low, high) if least is not None else (high, 4.0 * high)
    if least is None:
        return ""
    for _ in range(THRESHOLDS.memory_halvings):
        middle = math.sqrt(low * high)
        less = first_fit(_with_memory(problem, middle))
        least, low, high = (least, middle, high) if less is None else (less, low, middle)
    limits = {pool.name: pool.chip.memory_bytes for pool in problem.pools}
    most = max(least.estimate.memory, key=lambda memory: memory.total / limits[memory.pool])
    return (
        f"the most frugal plan found needs {bytes_text(most.total)} of the "
        f"{bytes_text(limits[most.pool])} of a chip of '{most.pool}' ({most.name})"
    )


def _with_memory(problem: Problem, times: float) -> Problem:
    """Return the same question for chips with so many times their memory."""
    pools = []
    for pool in problem.cluster.pools:
        chip = replace(pool.chip, memory_bytes=times * pool.chip.memory_bytes)
        pools.append(replace(pool, node=replace(pool.node, chip=chip)))
    return replace(problem, cluster=replace(problem.cluster, pools=tuple(pools)))


def _too_much_state(problem: Problem) -> str:
    """Say so where parameters and what trains them exceed all memory, however they are shared."""
    model, precision = problem.model, problem.job.precision
    frozen = (model.num_parameters - model.num_trained) * precision.parameters.num_bytes
    if model.tuning is not None and model.tuning.base != "wide":
        frozen *= BASE_BYTES[model.tuning.base] / precision.parameters.num_bytes
    states = model.num_trained * _state_bytes(precision) + frozen
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
    """Yield changes, the cheapest first: settings, then numbers, then what is trained, then chips.

    Those of one setting come one by one, then all together.
    """
    space, job = problem.space, problem.job
    given = dict(_loosened(space))
    for words, wider in given.items():
        yield words, replace(problem, space=wider)
    everything = replace(
        space, recompute=ALL_RECOMPUTE, tp=None, cp=None, sequences=None, max_stages=None
    )
    if space.exportable is None:
        everything = replace(everything, shard=(0, 1, 2, 3), offload=ALL_OFFLOAD)
    free = replace(problem, space=everything)
    also = ""
    if len(given) > 1:
        also = ", without the limits on the strategy"
        yield "drop all limits on the strategy", free
    elif given:
        also = f" and {next(iter(given))}"
    narrow = PRECISIONS["pure_bf16"]
    if _state_bytes(narrow) < _state_bytes(job.precision):
        smaller = replace(job, precision=narrow)
        yield (
            f"--precision pure_bf16 (states of {_state_bytes(narrow):.0f} instead of "
            f"{_state_bytes(job.precision):.0f} bytes per parameter){also}",
            replace(free, job=smaller),
        )
    if space.pools is not None and len(problem.pools) < len(problem.cluster.pools):
        yield f"use all pools{also}", replace(free, space=replace(everything, pools=None))
    if job.sequence_length > 1:
        shorter = replace(job, sequence_length=job.sequence_length // 2)
        yield f"--sequence-length {shorter.sequence_length}{also}", replace(free, job=shorter)
    yield from _more_nodes(free)


def _loosened(space: Space) -> Iterator[tuple[str, Space]]:
    """Yield what a person has ruled out, one by one: what costs least time first."""
    if space.sequences is not None and min(space.sequences) > 1:
        yield "--micro-batch 1", replace(space, sequences=(1,))
    if set(space.shard) != {0, 1, 2, 3} and space.exportable is None:
        yield "allow shard levels 0-3", replace(space, shard=(0, 1, 2, 3))
    if set(space.recompute) != set(ALL_RECOMPUTE):
        yield "allow recomputation", replace(space, recompute=ALL_RECOMPUTE)
    if set(space.offload) != set(ALL_OFFLOAD) and space.exportable is None:
        yield "allow offload", replace(space, offload=ALL_OFFLOAD)
    if space.tp is not None:
        yield "a larger --tp-max", replace(space, tp=None)
    if space.cp is not None:
        yield "a larger --cp-max", replace(space, cp=None)
    if space.max_stages is not None:
        yield "a larger --max-stages", replace(space, max_stages=None)


def _state_bytes(precision: Precision) -> float:
    """Return the bytes that a parameter takes with all that trains it."""
    held = [precision.parameters, precision.gradients, precision.moments, precision.moments]
    if precision.master is not None:
        held.append(precision.master)
    return sum(dtype.num_bytes for dtype in held)


def _more_nodes(problem: Problem) -> Iterator[tuple[str, Problem]]:
    for factor in (2, 4, 8):
        try:
            pools = tuple(
                pool.of_nodes([None] * (pool.nodes * factor)) for pool in problem.cluster.pools
            )
        except ValueError:  # nodes without NICs stay alone
            return
        more = replace(problem.cluster, pools=pools)
        yield (
            f"{factor} times as many nodes ({more.num_chips} chips)",
            replace(problem, cluster=more),
        )
