"""Helix's cluster: our deployment beside one pipeline per kind of chip, ours and as Helix has it.

Llama-2-70B in fp16 on 4 A100-40, 8 L4 and 12 T4, one per node, 10 Gb/s, somebody always waiting
(Mei et al., ASPLOS 2025: 252 output tokens/s planned, 124 by one pipeline per kind). In their
artifact's simulation that baseline has layers 4 × 20, 8 × 10 and 8 × 7 + 4 × 6, whole prompts and
no more than 18, 40 and 3 requests under way, for vLLM left memory for so few. Memory is counted
twice: as in our catalog, and as vLLM left it to them (from its numbers of blocks).

    python benchmarks/serve_helix.py [--memory ours|theirs|both]
"""

from __future__ import annotations

import argparse
import importlib.resources
import time
from dataclasses import replace
from typing import Any

import yaml

from tutti.cost.memory.instruction_memory import Overheads
from tutti.document import Place
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.plan.serving import PAGE_SIZE, Lengths, Role, Service, Traffic
from tutti.search.serving.build_plan import build_plan
from tutti.search.serving.flows import Mixture
from tutti.search.serving.kinds import kinds_of
from tutti.search.serving.options import EngineOption
from tutti.search.serving.planner import plan_serving
from tutti.search.serving.question import ServeProblem
from tutti.simulate.serving.requests import draw
from tutti.simulate.serving.run import Deployment, simulate_serving

TRAFFIC = Traffic(
    prompt=Lengths(mean=763, sigma=0.8, longest=2048),
    output=Lengths(mean=232, sigma=0.8, longest=1024),
)
# of their baseline: layers of each chip, requests under way
THEIRS = {
    "a100": ((20,) * 4, 18),
    "l4": ((10,) * 8, 40),
    "t4": ((7,) * 8 + (6,) * 4, 3),
}
# bytes for weights and pages: blocks × 16 tokens × layers × 4,096 bytes and the layers' weights
LEFT_TO_THEM = {"A100-40": 34.37e9, "L4": 19.15e9, "T4": 11.5e9}
ROOM = 1.1  # pages of their baseline, of what its requests hold when they end
TURNS = 6  # how often each place is filled


def problem_of(memory: str) -> ServeProblem:
    """Return the question, with memory as in the catalog or as it was left to Helix."""
    text = importlib.resources.files("tutti.hardware") / "catalog" / "clusters" / "helix-24.yaml"
    document: dict[str, Any] = yaml.safe_load(text.read_text())
    if memory == "theirs":
        taken = Overheads().context_bytes + Overheads().workspace_bytes
        document["chips"] = [
            {"name": f"{name}-left", "base": name, "memory_bytes": int(left + taken)}
            for name, left in LEFT_TO_THEM.items()
        ]
        for node in document["nodes"]:
            node["chip"] += "-left"
    return ServeProblem(
        model=load_model("llama-2-70b"),
        cluster=Cluster.from_document(document, Place("helix-24")),
        service=Service(traffic=TRAFFIC),
    )


def their_baseline(problem: ServeProblem) -> float:
    """Return the output tokens a second of their three pipelines, in our simulator."""
    kinds = {kind.pool: kind for kind in kinds_of(problem)}
    mean, total = TRAFFIC.prompt.expected + TRAFFIC.output.expected, 0.0
    for pool, (layers, under_way) in THEIRS.items():
        lanes = min(len(layers), under_way)
        pages = max(ROOM * under_way * mean, lanes * TRAFFIC.longest) // PAGE_SIZE + lanes
        option = EngineOption(
            kinds=(kinds[pool],) * len(layers), layers=layers, role=Role.BOTH,
            lanes=lanes, slots=under_way,
            chunk=TRAFFIC.prompt.longest + under_way,
            pages=int(pages), rate=1.0, ideal=1.0, per_token_s=0.0,
        )  # fmt: skip
        tokens = served(problem, option)
        print(f"  {pool}: {under_way} requests under way, {tokens:.1f} tokens/s", flush=True)
        total += tokens
    return total


def served(problem: ServeProblem, option: EngineOption) -> float:
    """Return an engine's output tokens a second while somebody always waits."""
    mixture = Mixture(engines=((option, 1),), flows={}, rate=option.rate, bound=0.0)
    requests = draw(replace(TRAFFIC, requests_per_s=None), max(60, TURNS * option.slots), seed=1)
    result = simulate_serving(Deployment.of(build_plan(problem, mixture)), requests)
    return result.output_rate


def planned(problem: ServeProblem) -> float:
    """Plan, print what stands beside it, return the output tokens a second."""
    began = time.process_time()
    answer = plan_serving(problem)
    took = time.process_time() - began
    output = TRAFFIC.output.expected
    simulated = answer.best.result.output_rate
    print(f"  planned: {simulated:,.0f} tokens/s, {took:.1f} CPU seconds")
    for other in answer.compared:
        print(f"  {other.name}: promised {other.promised * output:,.0f} tokens/s")
    print(f"  bound of every mixture of these engines: {answer.bound * output:,.0f} tokens/s")
    return simulated


def main() -> None:
    """Print both memories."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", choices=("ours", "theirs", "both"), default="both")
    given = parser.parse_args()
    for memory in ("ours", "theirs"):
        if given.memory not in (memory, "both"):
            continue
        print(f"memory as {'in our catalog' if memory == 'ours' else 'vLLM left it to Helix'}")
        problem = problem_of(memory)
        ours = planned(problem)
        if (
            memory == "ours"
        ):  # by theirs it does not fit: they let the last requests be set by force
            theirs = their_baseline(problem)
            print(f"  their baseline: {theirs:.1f} tokens/s (124.3 in their simulator); "
                  f"planned ÷ it: {ours / theirs:.1f}")  # fmt: skip
        print(f"  planned ÷ Helix's plan in its simulator (252.1): {ours / 252.1:.1f}")


if __name__ == "__main__":
    main()
