"""Twelve jobs of four models on E1536: what mixes of pools are worth, beside one pool per job.

    python benchmarks/twelve_jobs.py worth.json [--gone 0,5]

The planner says how fast each model trains on 8 or 16 nodes of a pool, or of two pools in halves
(tabled once in the file, which a later run goes on with). Three jobs of each model then share the
cluster, in three ways: as users ask, 128 chips of one pool each, models dealt out over the pools;
the best of all ways with one pool per job; the best of all ways. A model's tokens count in
units of its speed on 16 nodes of A800s. The cluster's price is the same for all, so that the
ratios are those of throughput per price, whatever chips cost. `--gone`: so many nodes of each pool
are down.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from tutti.errors import InputError
from tutti.fleet.mix_values import Mix, Worth, shared_out
from tutti.fleet.model_jobs import MixTable, ModelJob
from tutti.hardware.cluster import Cluster
from tutti.search.ask_from_values import Limits, make_problem
from tutti.search.planner import plan

MODELS = ("llama-2-7b", "llama-2-13b", "llama-2-70b", "qwen3-14b")
EACH = 3  # jobs of a model
LIMITS = Limits(micro_batch=(1, 2), schedules=("1f1b",), max_stages=8, offload=False)
UNIT: Mix = (("a800", 16),)


def narrow_answer(job: ModelJob, part: Cluster) -> float | None:
    """Ask the planner in a narrow space, of 64 to 256 chips; None where nothing fits."""
    if not 64 <= part.num_chips <= 256:
        return None
    problem = make_problem(
        job.model, part, global_batch=job.global_batch, sequence_length=job.sequence_length,
        limits=LIMITS,
    )  # fmt: skip
    try:
        return plan(problem, compare=False).best.tokens_per_second
    except InputError:
        return None


def table_of(path: Path, cluster: Cluster) -> dict[str, list[Worth]]:
    """Return what each mix is worth to each model, as the file says, or asked now."""
    table = MixTable.load(cluster, path, ask=narrow_answer)
    jobs = {
        model: ModelJob(model=model, tokens=1.0, global_batch=512, sequence_length=2048,
                        least_nodes=4, most_nodes=16)
        for model in MODELS
    }  # fmt: skip
    table.fill(jobs.values(), lambda what, done, of: print(f"{done} of {of}: {what}"))
    return {model: table.worths(job) for model, job in jobs.items()}


def as_asked(cluster: Cluster, nodes: dict[str, int], jobs: list[str]) -> dict[str, Mix]:
    """Return 128 chips of one pool for each job, pools in turn, while there are any."""
    left, placed = dict(nodes), {}
    for job, pool in zip(jobs, itertools.cycle(cluster.pools), strict=False):
        count = 128 // pool.node.num_chips
        if left[pool.name] >= count:
            placed[job] = ((pool.name, count),)
            left[pool.name] -= count
    return placed


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("worth", type=Path)
    parser.add_argument("--gone", default="0,5")
    given = parser.parse_args()
    cluster = Cluster.load("E1536")
    by_model = table_of(given.worth, cluster)
    jobs = [f"{model} {number}" for number in range(EACH) for model in MODELS]
    tables = {job: by_model[job.split()[0]] for job in jobs}
    speed = {(job, one.mix): one.tokens_per_s for job in jobs for one in tables[job]}
    weights = {job: 1.0 / speed[job, UNIT] for job in jobs}
    alone = {job: [one for one in tables[job] if len(one.mix) == 1] for job in jobs}
    for gone in map(int, given.gone.split(",")):
        nodes = {pool.name: pool.nodes - gone for pool in cluster.pools}
        ways = {
            "as users ask, one pool each": as_asked(cluster, nodes, jobs),
            "best, one pool each": shared_out(nodes, alone, weights),
            "best, mixes too": shared_out(nodes, tables, weights),
        }
        print(f"{gone} nodes of each pool down:")
        base = None
        for name, placed in ways.items():
            total = sum(weights[job] * speed[job, mix] for job, mix in placed.items())
            base = total if base is None else base
            mixed = sum(len(mix) > 1 for mix in placed.values())
            print(
                f"  {name:28} {total:6.2f} in all, {total / base:5.3f}×; "
                f"{len(placed)} of {len(jobs)} jobs run, {mixed} on two pools"
            )


if __name__ == "__main__":
    main()
