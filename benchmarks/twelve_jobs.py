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
import json
import time
from pathlib import Path

from tutti.errors import InputError
from tutti.fleet.mix_values import Mix, Worth, mixes, shared_out
from tutti.hardware.cluster import Cluster
from tutti.search.ask_from_values import Limits, make_problem
from tutti.search.planner import plan

MODELS = ("llama-2-7b", "llama-2-13b", "llama-2-70b", "qwen3-14b")
EACH = 3  # jobs of a model
LIMITS = Limits(micro_batch=(1, 2), schedules=("1f1b",), max_stages=8, offload=False)
UNIT: Mix = (("a800", 16),)


def wanted(cluster: Cluster) -> list[Mix]:
    """Return the mixes that jobs choose among: 64 to 256 chips."""
    return [
        mix
        for mix in mixes(cluster, 4, 16)
        if 64 <= sum(n * cluster.pool(name).node.num_chips for name, n in mix) <= 256
    ]


def tokens_per_s(model: str, cluster: Cluster, mix: Mix) -> float | None:
    """Ask the planner; None where nothing fits."""
    part = cluster.only({pool: range(count) for pool, count in mix})
    try:
        problem = make_problem(model, part, global_batch=512, sequence_length=2048, limits=LIMITS)
        return plan(problem, compare=False).best.tokens_per_second
    except InputError:
        return None


def table_of(path: Path, cluster: Cluster) -> dict[str, list[Worth]]:
    """Return what each mix is worth to each model, as the file says, or asked now."""
    known = json.loads(path.read_text()) if path.exists() else {}
    for model, mix in itertools.product(MODELS, wanted(cluster)):
        key = f"{model} on " + " + ".join(f"{count} {name}" for name, count in mix)
        if key not in known:
            before = time.process_time()
            known[key] = [model, mix, tokens_per_s(model, cluster, mix)]
            path.write_text(json.dumps(known, indent=1))
            print(f"{key}: {known[key][2]} tokens/s, {time.process_time() - before:.1f} CPU s")
    tables: dict[str, list[Worth]] = {model: [] for model in MODELS}
    for model, mix, speed in known.values():
        if speed is not None:
            kept = tuple((name, count) for name, count in mix)
            tables[model].append(Worth(kept, speed, None))
    return tables


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
