"""Deployments on clusters drawn at random: what is promised, simulated, bounded; pools alone.

Every cluster is planned to the end, and so is each of its pools by itself, with separated roles
too: rates are those of the long simulations that confirm the answer. Some five to thirty CPU
seconds a cluster.

    python benchmarks/serve_clusters.py [--first 7701] [--cases 20] [--processes 1]
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np

from tutti.document import Place
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.plan.serving import Lengths, Limits, Service, Traffic
from tutti.search.serving.planner import ServeAnswer, plan_serving
from tutti.search.serving.question import ServeProblem

MODELS = ("qwen3-8b", "qwen2.5-14b", "llama-3.1-8b", "qwen3-32b")
CHIPS = ("L4", "A100-40", "A100-80", "H20", "L40S", "H100", "910B2")


def drawn(seed: int) -> ServeProblem:
    """Return a cluster of two or three kinds of chips, a model and a workload."""
    r = random.Random(seed)
    pools = [
        {"name": f"p{number}", "chip": chip, "nodes": r.choice([1, 2, 4]),
         "chips_per_node": r.choice([2, 4, 8])}
        for number, chip in enumerate(r.sample(CHIPS, r.choice([2, 2, 3])))
    ]  # fmt: skip
    prompt = Lengths(
        mean=r.choice([150, 400, 1000, 2500]), sigma=r.choice([0.3, 0.8, 1.0]), longest=4096
    )
    output = Lengths(mean=r.choice([60, 150, 300]), sigma=r.choice([0.3, 0.8]), longest=1024)
    limits = r.choice(
        [
            Limits(),
            Limits(first_token_s=5.0, per_token_s=0.1),
            Limits(first_token_s=2.0, per_token_s=0.05),
        ]
    )
    return ServeProblem(
        model=load_model(r.choice(MODELS)),
        cluster=Cluster.from_document({"name": "drawn", "pools": pools}, Place("drawn")),
        service=Service(traffic=Traffic(prompt=prompt, output=output), limits=limits),
    )


class Case(NamedTuple):
    """What was found of a cluster; zeros: no engine keeps the limits."""

    said: str
    promised: float = 0.0
    simulated: float = 0.0
    bound: float = 0.0
    alone: tuple[float, ...] = ()  # simulated, of each pool; 0: it cannot hold the model


def planned(problem: ServeProblem) -> ServeAnswer | None:
    """Return the answer; None if no engine fits, or none keeps the limits."""
    try:
        return plan_serving(problem)
    except InputError:
        return None


def judged(seed: int) -> Case:
    """Plan a case and its pools."""
    began = time.process_time()
    problem = drawn(seed)
    chips = ", ".join(f"{p.num_chips} {p.chip.name}" for p in problem.cluster.pools)
    name = f"{seed}: {problem.model.name} on {chips}"
    answer = planned(problem)
    if answer is None:
        return Case(f"{name}: no engine keeps the limits")
    took = time.process_time() - began
    rates = []
    for pool in problem.pools:
        own = planned(replace(problem, space=replace(problem.space, pools=(pool,))))
        rates.append(own.best.rate if own is not None else 0.0)
    rate, promised = answer.best.rate, answer.best.promised
    off = f"{100 * (promised / rate - 1):+.1f} %" if rate else "no rate kept"
    each = " + ".join(f"{alone:.4g}" for alone in rates)
    said = (
        f"{name}: promised {promised:.4g}, simulated {rate:.4g} requests/s ({off}), gap "
        f"{100 * answer.gap:.1f} %, pools alone {each}, {took:.1f} CPU s"
    )
    return Case(said, promised, rate, answer.bound, tuple(rates))


def sum_up(cases: Sequence[Case]) -> None:
    """Print medians and the furthest."""
    kept = [case for case in cases if case.simulated > 0.0]
    gaps = np.array([1.0 - case.simulated / case.bound for case in kept])
    off = np.abs([case.promised / case.simulated - 1.0 for case in kept])
    print(f"{len(kept)} of {len(cases)} cases: gap of the simulated rate to the bound, median "
          f"{100 * np.median(gaps):.1f} %, largest {100 * gaps.max():.1f} %")  # fmt: skip
    print(f"promised beside simulated: median {100 * np.median(off):.1f} %, largest "
          f"{100 * off.max():.1f} %, {int((off <= 0.03).sum())} within 3 %")  # fmt: skip
    whole = [case.simulated / sum(case.alone) for case in kept if min(case.alone) > 0.0]
    if whole:
        print(f"{len(whole)} where every pool serves alone: {100 * min(whole):.1f} % of them at "
              f"least, median {100 * float(np.median(whole)):.1f} %")  # fmt: skip
    parts = [c.simulated / sum(c.alone) for c in kept if min(c.alone) == 0.0 < sum(c.alone)]
    if parts:
        print(f"{len(parts)} where one cannot: {100 * min(parts):.1f} to {100 * max(parts):.1f} %")


def main() -> None:
    """Draw, plan, sum up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=7701)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.cases)
    cases = []
    with ProcessPoolExecutor(given.processes, get_context("spawn")) as pool:
        for case in pool.map(judged, seeds):
            print(case.said, flush=True)
            cases.append(case)
    sum_up(cases)


if __name__ == "__main__":
    main()
