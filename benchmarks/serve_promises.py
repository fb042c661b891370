"""What engines promise in the long run, beside long simulations of clusters drawn at random.

Every case draws two kinds of chips, a model and a workload without limits, takes of three engines
that fit, drawn too, the one with most lanes, and lets requests wait all the time: four for every
slot. Engines whose simulation would take more steps than asked for are left out, and said so.

    python benchmarks/serve_promises.py [--first 0] [--cases 12] [--most-steps 14000]
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace

import numpy as np

from tutti.document import Place
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.plan.serving import Lengths, Role, Service, Traffic
from tutti.search.serving.build_plan import build_plan
from tutti.search.serving.flows import Mixture
from tutti.search.serving.kinds import kinds_of
from tutti.search.serving.options import EngineOption, engine_options
from tutti.search.serving.question import ServeProblem, ServeSpace
from tutti.simulate.serving.requests import draw
from tutti.simulate.serving.run import Deployment, simulate_serving

MODELS = ("qwen3-8b", "qwen2.5-14b", "llama-3.1-8b", "qwen3-32b")
CHIPS = ("L4", "T4", "A100-40", "A100-80", "H20", "L40S", "H100")
TURNS, EXTRA = 4, 300  # requests: so many per slot, and some more


def drawn_problem(seed: int) -> ServeProblem:
    """Return a cluster of two kinds of chips, a model and a workload."""
    r = random.Random(seed)
    pools = [
        {"name": f"p{number}", "chip": chip, "nodes": r.choice([1, 2, 4]),
         "chips_per_node": r.choice([1, 2, 4])}
        for number, chip in enumerate(r.sample(CHIPS, 2))
    ]  # fmt: skip
    traffic = Traffic(
        prompt=Lengths(
            mean=r.choice([100, 300, 800, 2000]), sigma=r.choice([0.3, 0.8, 1.0]), longest=4096
        ),
        output=Lengths(mean=r.choice([30, 80, 150]), sigma=r.choice([0.3, 0.8]), longest=512),
    )
    return ServeProblem(
        model=load_model(r.choice(MODELS)),
        cluster=Cluster.from_document({"name": "drawn", "pools": pools}, Place("drawn")),
        service=Service(traffic=traffic),
        space=ServeSpace(separate=False),
    )


def drawn_engine(problem: ServeProblem, seed: int) -> EngineOption | None:
    """Return one of the engines that fit, rather one of several lanes."""
    r = random.Random(seed + 1000)
    options = engine_options(problem, kinds_of(problem), (Role.BOTH,))
    if not options:
        return None
    return max(r.sample(options, min(3, len(options))), key=lambda option: option.lanes)


def served(problem: ServeProblem, option: EngineOption) -> float:
    """Return the requests per second of a long simulation."""
    mixture = Mixture(engines=((option, 1),), flows={}, rate=option.rate, bound=0.0)
    deployment = Deployment.of(build_plan(problem, mixture))
    traffic = replace(problem.service.traffic, requests_per_s=None)
    requests = draw(traffic, EXTRA + TURNS * option.slots, 1)
    return simulate_serving(deployment, requests).request_rate


def main() -> None:
    """Draw, simulate, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=12)
    parser.add_argument("--most-steps", type=int, default=14_000)
    given = parser.parse_args()
    errors = []
    for seed in range(given.first, given.first + given.cases):
        problem = drawn_problem(seed)
        option = drawn_engine(problem, seed)
        if option is None:
            print(f"{seed}: {problem.model.name} fits nowhere")
            continue
        rows = max(1.0, 0.8 * option.slots / option.lanes)
        steps = (EXTRA + TURNS * option.slots) * problem.service.traffic.output.expected / rows
        if steps > given.most_steps:
            print(f"{seed}: {option.name} left out, about {steps:,.0f} steps")
            continue
        rate = served(problem, option)
        errors.append(option.rate / rate - 1.0)
        print(
            f"{seed}: {problem.model.name} on {option.name}, {option.lanes} lanes, chunk "
            f"{option.chunk}: promised {option.rate:.4g}/s, simulated {rate:.4g}/s, "
            f"{100 * errors[-1]:+.1f} %",
            flush=True,
        )
    far = np.abs(errors)
    print(
        f"{len(errors)} cases: median {100 * np.median(far):.1f} %, worst {100 * far.max():.1f} %, "
        f"{(far <= 0.1).sum()} within 10 %"
    )


if __name__ == "__main__":
    main()
