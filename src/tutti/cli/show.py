"""`tutti show`: a Plan as drawing and table, checked; on request its instruction lists."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.errors import InputError
from tutti.units import many

if TYPE_CHECKING:
    from tutti.plan.plan import Plan
    from tutti.schedule.schedule import Schedule


def show(
    plan: Annotated[Path, typer.Argument(help="A plan file.")],
    model: Annotated[
        str | None, typer.Option(help="The model, where the plan does not embed it.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="The cluster, where the plan does not embed it.")
    ] = None,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Show the instruction list of each class of ranks.")
    ] = False,
    most: Annotated[int, typer.Option(help="Instructions shown per list.", min=1)] = 40,
    export: Annotated[
        str | None,
        typer.Option(
            help="Print the plan as megatron arguments or flagscale YAML.", metavar="FORMAT"
        ),
    ] = None,
    export_to: Annotated[
        Path | None, typer.Option(help="Write the export to a file instead.", metavar="FILE")
    ] = None,
    json: Json = False,
) -> None:
    """Draw a plan, check it, and prove that its schedule cannot hang.

    Of a plan for serving: its engines, their roles, and which of them feeds which.
    """
    from tutti.cli.plan.results import Results
    from tutti.hardware.cluster import Cluster
    from tutti.models.load import load_model
    from tutti.plan.check import check_plan, embedded_cluster, embedded_model
    from tutti.plan.drawing import draw_plan
    from tutti.plan.files import load_plan
    from tutti.schedule.check import check_schedule
    from tutti.schedule.schedule import build_schedule

    results = Results(export=export, export_to=export_to, json=json)
    results.check(str(plan), None)
    loaded = load_plan(plan)
    spec = load_model(model) if model else None
    machines = Cluster.load(cluster) if cluster else None
    problems = [str(problem) for problem in check_plan(loaded, spec, machines)]
    serves = loaded.job.serving is not None
    if serves and (schedule or export is not None):
        raise InputError(
            f"{plan.name}: serves; --schedule and --export are for plans of a training step"
        )
    lists = None if problems or serves else build_schedule(loaded)
    if lists is not None:
        problems = check_schedule(lists)
    if json:
        print_json(_document(loaded, lists if schedule else None, problems))
    elif not results.prints_export:
        if loaded.pipelines:
            print_rich(draw_plan(loaded))
        if schedule and lists is not None:
            _print_lists(lists, most)
    if problems:
        for problem in problems[1:]:
            typer.echo(f"tutti: {plan.name}: {problem}", err=True)
        raise InputError(f"{plan.name}: {problems[0]}")
    if export is not None:
        spec, machines = spec or embedded_model(loaded), machines or embedded_cluster(loaded)
        results.write_export(loaded, spec, machines)
    if not results.prints_export:
        results.say_written()
        _say_checked(lists, quiet=json)
        if serves and not json:
            typer.echo(f"checked: {many(len(loaded.pipelines), 'kind')} of engines, their routes")


def _say_checked(lists: Schedule | None, *, quiet: bool) -> None:
    if quiet or lists is None:
        return
    total = sum(len(c.instructions) for c in lists.classes)
    typer.echo(
        f"checked: {many(len(lists.classes), 'class', 'classes')} of ranks, "
        f"{many(total, 'instruction')}, "
        "every tensor received once, no deadlock"
    )


def _document(plan: Plan, lists: Schedule | None, problems: list[str]) -> dict[str, object]:
    from tutti.plan.files import plan_to_document

    document: dict[str, object] = {"plan": plan_to_document(plan), "problems": problems}
    if lists is not None:
        document["schedule"] = [
            {
                "pipeline": c.pipeline,
                "stage": c.stage,
                "replica": c.replica,
                "num_ranks": c.num_ranks,
                "instructions": [
                    {
                        "op": entry.op.value,
                        "lane": entry.lane.value,
                        "micro_batch": entry.micro_batch,
                        "units": [entry.start, entry.stop],
                        "what": entry.what.value,
                        "scope": entry.scope.value,
                        "after": list(entry.after),
                    }
                    for entry in c.instructions
                ],
            }
            for c in lists.classes
        ]
    return document


def _print_lists(lists: Schedule, most: int) -> None:
    for c in lists.classes:
        typer.echo(
            f"\n{c.name} ({many(c.num_ranks, 'rank')}, {many(len(c.instructions), 'instruction')})"
        )
        for index, entry in enumerate(c.instructions[:most]):
            after = f"  after {', '.join(map(str, entry.after))}" if entry.after else ""
            typer.echo(f"  {index:5d}  {entry.lane.value:8s} {entry}{after}")
        if len(c.instructions) > most:
            typer.echo(f"         … {len(c.instructions) - most:,} more (--most)")
