"""`tutti plan` with a search: asks the planner, shows the answer, compares changed clusters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tutti.cli.plan.results import Results
from tutti.cli.shared.output import print_json, print_rich, say_doubtful_length
from tutti.cli.shared.progress import ProgressLine
from tutti.errors import InputError

if TYPE_CHECKING:
    from tutti.cost.plan.sources import Sources
    from tutti.hardware.cluster import Cluster
    from tutti.search.answer.result import SearchResult
    from tutti.search.question.space import Problem
    from tutti.search.replan.replan import Replanned
    from tutti.search.replan.state_movement import NodeMoves


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a person typed, taken apart but not yet understood."""

    model: str
    cluster: str | Cluster
    job: Mapping[str, Any]
    limits: Mapping[str, Any]
    objective: str
    calibrations: Path | None
    profile: Path | None
    extrapolate: bool
    chip_profiles: tuple[str, ...]
    what_if: tuple[str, ...]
    replan_from: Path | None


def search(asked: Asked, results: Results) -> None:
    """Answer a question to the planner."""
    if asked.replan_from is not None:
        _replan(asked, asked.replan_from, results)
        return
    from tutti.cli.plan.changes import change_rows, changes_table
    from tutti.search.planner import plan
    from tutti.search.question.what_if import change_cluster

    problem = _problem(asked, asked.job)
    if results.json or results.prints_export:  # else it stands below the tables
        say_doubtful_length(problem.model, problem.job.sequence_length)
    changes = [(text, change_cluster(problem.cluster, text)) for text in asked.what_if]
    with ProgressLine("planning", wanted=not results.json) as line:
        result = plan(problem, report=line)
    results.write_plan(result.best.plan)
    results.write_page(result, problem.model, problem.cluster)
    rows = change_rows(problem, result, changes, quiet=results.json)
    if results.json:
        print_json(result.to_document() | ({"what_if": rows} if rows else {}))
    elif not results.prints_export:
        _show(result, problem)
        if rows:
            print_rich(changes_table(rows))
        for text, change in changes:
            _say_renumbered(change.moved, f"{text}: ")
    _export(results, result, problem)
    if not results.prints_export:
        results.say_written()
        if results.output is not None and asked.chip_profiles and not results.json:
            typer.echo("note: the plan does not hold profiles; predict and simulate need them, too")
    if result.interrupted:
        raise typer.Exit(130)


def _export(results: Results, result: SearchResult, problem: Problem) -> None:
    free = problem.space.exportable != results.export
    results.write_export(result.best.plan, problem.model, problem.cluster, searched=free)


def _show(result: SearchResult, problem: Problem) -> None:
    from tutti.search.answer.explain import explain, render

    print_rich(render(explain(result, problem.model, problem.cluster)))


def _problem(asked: Asked, job: Mapping[str, Any], cluster: Cluster | None = None) -> Problem:
    from tutti.search.ask_from_values import Limits, make_problem

    given = {name: value for name, value in job.items() if value is not None}
    return make_problem(
        asked.model,
        cluster or asked.cluster,
        **given,
        objective=asked.objective,
        limits=Limits(**asked.limits),
        sources=_sources(asked),
    )


def _sources(asked: Asked) -> Sources:
    from tutti.cli.predict import load_sources

    return load_sources(
        asked.calibrations, asked.profile, asked.chip_profiles, extrapolate=asked.extrapolate
    )


# --- a running plan --------------------------------------------------------------------------


def _replan(asked: Asked, old_plan: Path, results: Results) -> None:
    from tutti.hardware.cluster import Cluster
    from tutti.plan.files import load_plan
    from tutti.search.question.what_if import change_cluster
    from tutti.search.replan.changed_plan import changed_plan
    from tutti.search.replan.replan import replan

    if len(asked.what_if) > 1:
        raise InputError(
            "--replan-from: give one --what-if; several changes at once are written with commas"
        )
    old = load_plan(old_plan)
    cluster, moved, change = Cluster.load(asked.cluster), None, None
    if asked.what_if:
        _require_running_on(old_plan, old.cluster.name, old.cluster.hash, cluster)
        change = change_cluster(cluster, asked.what_if[0])
        cluster, moved = change.cluster, change.moved if change.parts is None else None
    running = {
        "global_batch": old.job.global_batch,
        "sequence_length": old.job.sequence_length,
        "precision": old.job.precision.to_document(),
    }
    given = {name: value for name, value in asked.job.items() if value is not None}
    problem = _problem(asked, {**running, **given}, cluster)
    if change is not None:
        old = changed_plan(old, change, problem.model)
    with ProgressLine("re-planning", wanted=not results.json) as line:
        replanned = replan(old, problem, moved=moved, report=line)
    best = replanned.result.best.plan
    parts = change.parts if change is not None else None
    results.write_plan(best if parts is None else parts.to_real(best))
    results.write_page(replanned.result, problem.model, problem.cluster)
    _show_replanned(replanned, problem, results, moved or {})
    _export(results, replanned.result, problem)
    if not results.prints_export:
        results.say_written()
    if replanned.result.interrupted:
        raise typer.Exit(130)


def _require_running_on(path: Path, name: str, said: str, cluster: Cluster) -> None:
    """Refuse to renumber the nodes of a cluster that the old plan does not run on."""
    if said and said != cluster.fingerprint():
        raise InputError(
            f"--what-if: changes the cluster that {path.name} runs on, but that is '{name}' "
            f"({said}), not this '{cluster.name}' ({cluster.fingerprint()})"
        )


def _say_renumbered(moved: NodeMoves, of: str = "") -> None:
    """Say which nodes have other numbers in the changed cluster, and so in the new plan."""
    from tutti.search.question.renumbering import renumbering_text

    if words := renumbering_text(moved):
        typer.echo(f"note: {of}nodes behind a lost one move up: {words} (old → new number)")


def _show_replanned(
    replanned: Replanned, problem: Problem, results: Results, moved: NodeMoves
) -> None:
    from tutti.cli.plan.changes import replan_table

    if results.json:
        print_json(replanned.result.to_document() | {"replan": replanned.to_document()})
    elif not results.prints_export:
        _show(replanned.result, problem)
        print_rich(replan_table(replanned))
        typer.echo(replanned.words)
        _say_renumbered(moved)
