"""`tutti plan --serve WORKLOAD`: the deployment that serves most, explained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.cli.plan.results import Results
from tutti.cli.shared.output import print_json, print_rich
from tutti.cli.shared.progress import ProgressLine
from tutti.errors import InputError, hint

if TYPE_CHECKING:
    from tutti.hardware.cluster import Cluster
    from tutti.plan.serving import Service
    from tutti.search.serving.question import ServeProblem

OBJECTIVES = ("rate", "cost", "chips")
WEIGHTS = ("fp8", "int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeAsked:
    """What a person typed, taken apart but not yet understood."""

    model: str
    cluster: str | Cluster
    workload: Path
    objective: str
    rate: float | None
    first_token: float | None
    per_token: float | None
    weights: str | None
    no_separation: bool
    limits: Mapping[str, Any]
    chip_profiles: tuple[str, ...]


def plan_deployment(asked: ServeAsked, results: Results) -> None:
    """Search the deployment, show it, write the plan."""
    from tutti.search.serving.answer import answer_document, answer_table
    from tutti.search.serving.planner import plan_serving

    problem = _problem(asked)
    with ProgressLine("planning", wanted=not results.json):
        answer = plan_serving(problem)
    results.write_plan(answer.plan)
    if results.html is not None:
        from tutti.report.serving import write_serving_page

        write_serving_page(results.html, answer.plan, answer.best.result)
    if results.json:
        print_json(answer_document(answer))
        return
    print_rich(answer_table(answer))
    results.say_written()


def _problem(asked: ServeAsked) -> ServeProblem:
    from tutti.cli.predict import load_sources
    from tutti.cost.measured.pools import measured_pools
    from tutti.hardware.chip import Dtype
    from tutti.hardware.cluster import Cluster
    from tutti.models.load import load_model
    from tutti.search.serving.question import ServeProblem, ServeSpace
    from tutti.simulate.serving.traces import load_workload

    if asked.objective not in OBJECTIVES:
        raise InputError(f"--objective: '{asked.objective}'; {hint(asked.objective, OBJECTIVES)}")
    if asked.weights is not None and asked.weights not in WEIGHTS:
        raise InputError(f"--weights: '{asked.weights}'; {hint(asked.weights, WEIGHTS)}")
    model, cluster = load_model(asked.model), Cluster.load(asked.cluster)
    names = [pool.name for pool in cluster.pools]
    for name in asked.limits["pools"]:
        if name not in names:
            raise InputError(f"--pool-only: no pool '{name}'; {hint(name, names)}")
    sources = load_sources(None, None, list(asked.chip_profiles), extrapolate=False)
    used = asked.limits["pools"] or names
    return ServeProblem(
        model=model,
        cluster=cluster,
        service=_service(load_workload(asked.workload).service, asked),
        objective=asked.objective,  # type: ignore[arg-type]
        space=ServeSpace(
            pools=tuple(asked.limits["pools"]),
            separate=not asked.no_separation,
            mix=bool(asked.limits["mixed_stages"]),
            tp_max=asked.limits["tp_max"],
            max_stages=asked.limits["max_stages"],
            weights=None if asked.weights is None else Dtype(asked.weights),
        ),
        measured=measured_pools(sources.profiles, cluster, dict.fromkeys(used, Dtype.BF16)),
    )


def _service(service: Service, asked: ServeAsked) -> Service:
    """Return a workload with the rate and limits that options give."""
    for name, value in (
        ("--rate", asked.rate),
        ("--first-token", asked.first_token),
        ("--per-token", asked.per_token),
    ):
        if value is not None and not 0 < value < float("inf"):
            raise InputError(f"{name}: {value:g}; give more than 0")
    traffic, limits = service.traffic, service.limits
    if asked.rate is not None:
        traffic = replace(traffic, requests_per_s=asked.rate)
    if asked.first_token is not None:
        limits = replace(limits, first_token_s=asked.first_token)
    if asked.per_token is not None:
        limits = replace(limits, per_token_s=asked.per_token)
    return replace(service, traffic=traffic, limits=limits)
