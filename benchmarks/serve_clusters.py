"""Deployments on clusters drawn at random: the gap to the bound, and all pools beside each alone.

Rates are those that the planner promises, which long simulations confirm within 8 % (see
`serve_promises.py`); with `--simulate` each cluster is planned to the end and the gap is that of
the simulated rate, some ten to sixty CPU seconds a cluster.

    python benchmarks/serve_clusters.py [--first 7701] [--cases 20] [--simulate]
"""

from __future__ import annotations

import argparse
import random
import time

import numpy as np

from tutti.document import Place
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.plan.serving import Lengths, Limits, Service, Traffic
from tutti.search.serving.flows import solve_flows
from tutti.search.serving.kinds import kinds_of
from tutti.search.serving.options import EngineOption, engine_options
from tutti.search.serving.planner import ALL_ROLES, plan_serving
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


def alone(problem: ServeProblem, options: list[EngineOption]) -> list[float]:
    """Return what each pool promises by itself, with separated roles too; 0: no engine fits."""
    rates = []
    for pool in problem.pools:
        own = solve_flows(problem, [o for o in options if set(o.chips) == {pool}])
        rates.append(own.rate if own is not None else 0.0)
    return rates


def judged(seed: int, simulate: bool) -> tuple[float, float, bool] | None:
    """Print a case; return its gap, its efficiency, and whether every pool serves by itself."""
    began = time.process_time()
    problem = drawn(seed)
    chips = ", ".join(f"{p.num_chips} {p.chip.name}" for p in problem.cluster.pools)
    name = f"{seed}: {problem.model.name} on {chips}"
    options = engine_options(problem, kinds_of(problem), ALL_ROLES)
    mixture = solve_flows(problem, options)
    if mixture is None or mixture.rate <= 0.0:
        print(f"{name}: no engine keeps the limits")
        return None
    pools = alone(problem, options)
    rate, bound = mixture.rate, mixture.bound
    efficiency = rate / sum(pools) if sum(pools) else float("inf")
    if simulate:
        try:
            answer = plan_serving(problem)
        except InputError as error:
            print(f"{name}: {error}")
            return None
        rate, bound = answer.best.rate, answer.bound
    gap = 1.0 - rate / bound
    serve = sum(each > 0.0 for each in pools)
    print(
        f"{name}: {rate:.4g} requests/s, gap {100 * gap:.1f} %, {100 * efficiency:.1f} % of the "
        f"pools alone ({serve} of {len(pools)} serve), {time.process_time() - began:.1f} CPU s",
        flush=True,
    )
    return gap, efficiency, serve == len(pools)


def main() -> None:
    """Draw, plan, sum up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=7701)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--simulate", action="store_true")
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.cases)
    cases = [case for seed in seeds if (case := judged(seed, given.simulate)) is not None]
    gaps = np.array([gap for gap, _, _ in cases])
    print(f"{len(cases)} cases: median gap {100 * np.median(gaps):.1f} %, "
          f"largest {100 * gaps.max():.1f} %")  # fmt: skip
    whole = [efficiency for _, efficiency, every in cases if every]
    if whole:
        print(f"{len(whole)} where every pool serves alone: {100 * min(whole):.1f} % of them at "
              f"least, median {100 * float(np.median(whole)):.1f} %")  # fmt: skip


if __name__ == "__main__":
    main()
