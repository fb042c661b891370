"""`tutti plan`: search the best strategy for a model on a cluster, or lay a uniform one over it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tutti.cli.plan import options
from tutti.cli.predict import CalibrationFolder, ChipProfiles, Extrapolate, ProfileFolder
from tutti.cli.shared.output import Json
from tutti.errors import InputError

if TYPE_CHECKING:
    from tutti.cli.plan.results import Results
    from tutti.cli.plan.search import Asked
    from tutti.hardware.cluster import Cluster


def plan(
    model: options.Model,
    cluster: options.ClusterName,
    global_batch: options.GlobalBatch = None,
    sequence_length: options.SequenceLength = None,
    precision: options.Precision = None,
    objective: options.Objective = "time",
    serve: options.Serve = None,
    rate: options.Rate = None,
    first_token: options.FirstToken = None,
    per_token: options.PerToken = None,
    weights: options.Weights = None,
    no_separation: options.NoSeparation = False,
    uniform: options.Uniform = None,
    tp_max: options.TpMax = None,
    cp_max: options.CpMax = None,
    max_stages: options.MaxStages = None,
    micro_batch: options.MicroBatch = None,
    schedule: options.Schedule = None,
    shard: options.Shard = None,
    on: options.On = None,
    pool_only: options.PoolOnly = None,
    no_offload: options.NoOffload = False,
    no_recompute: options.NoRecompute = False,
    no_mixed_stages: options.NoMixedStages = False,
    no_mixed_pipelines: options.NoMixedPipelines = False,
    use_all_pools: options.UseAllPools = False,
    exportable: options.Exportable = None,
    calibrations: CalibrationFolder = None,
    profile: ProfileFolder = None,
    extrapolate: Extrapolate = False,
    chip_profile: ChipProfiles = None,
    what_if: options.WhatIf = None,
    replan_from: options.ReplanFrom = None,
    export: options.Export = None,
    export_to: options.ExportTo = None,
    html: options.Html = None,
    output: options.Output = None,
    json: Json = False,
) -> None:
    """Search the best strategy for a model on a cluster, explain it, write the Plan.

    With --serve: the deployment that serves most requests within the limits.
    """
    from tutti.cli.plan.results import Results
    from tutti.cli.plan.search import search
    from tutti.cli.plan.uniform import lay_uniform

    schedules = _words(schedule)
    results = Results(output=output, html=html, export=export, export_to=export_to, json=json)
    results.check(cluster, replan_from)
    part = cluster if on is None else _part_of(cluster, on, quiet=json)
    job: dict[str, Any] = {"global_batch": global_batch, "sequence_length": sequence_length,
                           "precision": precision}  # fmt: skip
    limits: dict[str, Any] = {
        "tp_max": tp_max, "cp_max": cp_max, "max_stages": max_stages, "exportable": exportable,
        "micro_batch": _numbers("--micro-batch", micro_batch), "shard": _numbers("--shard", shard),
        "pools": tuple(pool_only or ()), "idle": not use_all_pools, "offload": not no_offload,
        "recompute": not no_recompute, "mixed_stages": not no_mixed_stages,
        "mixed_pipelines": not no_mixed_pipelines,
    }  # fmt: skip
    given: dict[str, Any] = {
        "what_if": what_if, "replan_from": replan_from, "profile": profile,
        "calibrations": calibrations, "chip_profile": chip_profile,
    }  # fmt: skip
    asked = {"rate": rate, "first_token": first_token, "per_token": per_token, "weights": weights,
             "no_separation": no_separation}  # fmt: skip
    if serve is not None:
        _refuse_with_serve({**job, **given, "uniform": uniform, "export": export})
        _serve(model, part, serve, objective, asked, limits, chip_profile, results)
        return
    _refuse_without_serve(asked)
    if uniform is not None:
        _refuse_with_uniform({**limits, **given, "html": html}, objective)
        lay_uniform(model, part, uniform, job, schedules, results)
        return
    limits["schedules"] = schedules
    search(_asked(model, part, job, limits, given, objective, extrapolate=extrapolate), results)


def _part_of(name: str, on: list[str], *, quiet: bool) -> Cluster:
    """Return some nodes of a cluster, and say which number each has in the plan."""
    from tutti.hardware.cluster import Cluster
    from tutti.hardware.node_list import parse_nodes
    from tutti.search.question.renumbering import renumbering_text

    try:
        nodes = parse_nodes(on)
        part = Cluster.load(name).only(nodes)
    except InputError as error:
        raise InputError(f"--on: {error}") from None
    moved = {
        (pool, old): (pool, new) for pool, chosen in nodes.items() for new, old in enumerate(chosen)
    }
    if (words := renumbering_text(moved)) and not quiet:
        typer.echo(f"note: nodes of the cluster have other numbers in the plan: {words}", err=True)
    return part


def _serve(
    model: str,
    cluster: str | Cluster,
    workload: Path,
    objective: str,
    asked: dict[str, Any],
    limits: dict[str, Any],
    chip_profiles: list[str] | None,
    results: Results,
) -> None:
    """Plan a deployment."""
    from tutti.cli.plan.serving import ServeAsked, plan_deployment

    question = ServeAsked(
        model=model, cluster=cluster, workload=workload, limits=limits,
        objective="rate" if objective == "time" else objective,
        chip_profiles=tuple(chip_profiles or ()), **asked,
    )  # fmt: skip
    plan_deployment(question, results)


def _refuse_with_serve(given: dict[str, Any]) -> None:
    """Refuse options of a training step."""
    for name, value in given.items():
        if value is not None and name != "chip_profile":
            option = "--" + name.replace("_", "-")
            raise InputError(f"{option}: is for training; drop it, or --serve")


def _refuse_without_serve(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if value:
            raise InputError(f"--{name.replace('_', '-')}: goes with --serve WORKLOAD")


def _asked(
    model: str,
    cluster: str | Cluster,
    job: dict[str, Any],
    limits: dict[str, Any],
    given: dict[str, Any],
    objective: str,
    *,
    extrapolate: bool,
) -> Asked:
    """Return the question that the options ask."""
    from tutti.cli.plan.search import Asked

    return Asked(
        model=model, cluster=cluster, job=job, limits=limits, objective=objective,
        extrapolate=extrapolate, calibrations=given["calibrations"], profile=given["profile"],
        chip_profiles=tuple(given["chip_profile"] or ()), what_if=tuple(given["what_if"] or ()),
        replan_from=given["replan_from"],
    )  # fmt: skip


def _words(texts: list[str] | None) -> tuple[str, ...]:
    return tuple(word.strip() for text in texts or () for word in text.split(",") if word.strip())


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isdecimal():
            raise InputError(f"{option}: '{word}' is no number; write a list such as 1,2,4")
    return tuple(map(int, words))


def _refuse_with_uniform(given: dict[str, Any], objective: str) -> None:
    """Refuse options that only a search can obey."""
    names = {
        "pools": "--pool-only",
        "idle": "--use-all-pools",
        "offload": "--no-offload",
        "recompute": "--no-recompute",
        "mixed_stages": "--no-mixed-stages",
        "mixed_pipelines": "--no-mixed-pipelines",
    }
    wrong = [name for name, value in given.items() if value is False or value not in (None, ())]
    wrong = [name for name in wrong if given[name] is not True]
    wrong += ["objective"] if objective != "time" else []
    if wrong:
        option = names.get(wrong[0], "--" + wrong[0].replace("_", "-"))
        raise InputError(f"{option}: goes with a search, which --uniform leaves out; drop one")
