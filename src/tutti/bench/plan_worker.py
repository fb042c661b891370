"""One instance of `tutti bench plan` in a process of its own, so that its peak memory is its own.

    python -m tutti.bench.plan_worker S16          prints the row as JSON
    python -m tutti.bench.plan_worker OPT-8 DIR    a comparison row on the layer profiles in DIR

A first, tiny plan loads and compiles everything before the clock starts.
"""

from __future__ import annotations

import itertools
import json
import resource
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.bench.plan_instances import INSTANCES, Instance
from tutti.errors import TuttiError

if TYPE_CHECKING:
    from tutti.search.answer.result import SearchResult
    from tutti.search.question.space import Problem

Row = dict[str, Any]
_WARM_UP = {
    "name": "warm-up",
    "pools": [
        {"name": "new", "chip": "A100-80", "chips_per_node": 2},
        {"name": "old", "chip": "V100-32", "chips_per_node": 2},
    ],
}


def warm_up() -> None:
    """Plan something tiny, so that imports and compilation are done."""
    from tutti.document import Place
    from tutti.hardware.cluster import Cluster
    from tutti.search.ask_from_values import ask

    cluster = Cluster.from_document(_WARM_UP, Place("warm-up"))
    ask("llama-3.2-1b", cluster, sequence_length=1024, global_batch=16)


def peak_mib() -> float:
    """Return the most memory that this process ever had resident.

    Linux counts what the process that started it had, too, in what `getrusage` says.
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text(encoding="utf-8").splitlines()
        sizes = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
        if sizes:
            return int(sizes[0]) / 2**10
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / (2**20 if sys.platform == "darwin" else 2**10)


def run_instance(instance: Instance) -> Row:
    """Plan one instance and return its row."""
    from tutti.search.ask_from_values import make_problem
    from tutti.search.planner import plan

    problem = make_problem(
        instance.model,
        instance.cluster,
        sequence_length=instance.sequence_length,
        global_batch=instance.global_batch,
    )
    result = plan(problem)
    row = _figures(instance, problem, result)
    row["peak_mib"] = peak_mib()
    if instance.half_links:
        row["efficiency_half_links_pct"] = _half_links(problem, result)
    if instance.lose_node:
        row |= _lose_node(problem, result)
    return row


def _figures(instance: Instance, problem: Problem, result: SearchResult) -> Row:
    from tutti.search.answer.explain import explain

    uniform = result.uniform
    pools = explain(result, problem.model, problem.cluster).pools
    return {
        "instance": instance.name,
        "bar": instance.bar,
        "model": problem.model.name,
        "chips": problem.cluster.num_chips,
        "search_cpu_s": result.search_cpu_seconds,
        "step_time_s": result.best.step_seconds,
        "mfu": result.best.estimate.mfu,
        "lower_bound_s": result.lower_bound_seconds,
        "gap_pct": result.gap_pct,
        "mixed_efficiency_pct": result.mixed_efficiency_pct,
        "uniform_step_time_s": uniform.step_seconds if uniform is not None else None,
        "uniform_missing": result.uniform_missing,
        "speedup": result.speedup,
        "nominal": [row.pool for row in pools if row.nominal],
        "unlimited_memory": [
            name for name, candidate in result.alone.items() if not candidate.fits
        ],
        "summary": result.best.summary,
        "work": dict(result.work),
    }


def _half_links(problem: Problem, result: SearchResult) -> float | None:
    """Return the mixed-chip efficiency with half the bandwidth between pools."""
    from tutti.search.planner import plan
    from tutti.search.question.what_if import change_cluster

    if result.mixed_efficiency_pct is None:
        return None
    names = [pool.name for pool in problem.cluster.pools]
    text = ", ".join(f"link {a} {b} 0.5" for a, b in itertools.combinations(names, 2))
    changed = replace(problem, cluster=change_cluster(problem.cluster, text).cluster)
    slower = plan(changed, compare=False)
    return (
        result.mixed_efficiency_pct
        * slower.best.tokens_per_second
        / (result.best.tokens_per_second)
    )


def _lose_node(problem: Problem, result: SearchResult) -> Row:
    """Re-plan without the first node."""
    from tutti.search.question.what_if import change_cluster
    from tutti.search.replan.replan import replan

    change = change_cluster(problem.cluster, "-node 0")
    changed = replace(problem, cluster=change.cluster)
    replanned = replan(result.best.plan, changed, moved=change.moved)
    return {
        "replan_cpu_s": replanned.result.search_cpu_seconds,
        "replan_step_time_s": replanned.result.best.step_seconds,
        "replan_moved_bytes": replanned.movement.total_bytes,
        "replan_payback_s": replanned.payback_seconds,
    }


def main(arguments: list[str]) -> None:
    """Run what the arguments name and print its row, or why there is none."""
    from tutti.bench.plan_opt import run_opt

    name = arguments[0]
    work: Callable[[], Row] = (
        (lambda: run_opt(int(name.removeprefix("OPT-")), Path(arguments[1])))
        if name.startswith("OPT-")
        else (lambda: run_instance(INSTANCES[name]))
    )
    try:
        warm_up()
        row = work()
    except TuttiError as error:
        row = {"instance": name, "why": str(error)}
    sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
