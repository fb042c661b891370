"""`tutti plan`: lay a strategy over a cluster. Uniform ones from a few numbers, for now."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tutti.cli.output import Json, print_json, print_rich
from tutti.errors import InputError


def plan(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, a config.json, or a name.")],
    cluster: Annotated[str, typer.Argument(help="A cluster file, or the name of an example.")],
    uniform: Annotated[
        str | None,
        typer.Option(
            help="Megatron-style degrees: tp=8,pp=4 and any of cp, ep, dp, vpp, mbs, sp, shard, "
            "recompute.",
            metavar="DEGREES",
        ),
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(help="Sequences per step (default: 8 micro-batches per stage).")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(help="Tokens per sequence (default: 4096 or the model's limit).")
    ] = None,
    schedule: Annotated[
        str, typer.Option(help="gpipe, 1f1b, interleaved or zero_bubble.")
    ] = "1f1b",
    precision: Annotated[str, typer.Option(help="bf16, fp16, fp32 or pure_bf16.")] = "bf16",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan.")] = None,
    json: Json = False,
) -> None:
    """Lay a model over a cluster and write the Plan."""
    from tutti.document import Place, build
    from tutti.hardware.cluster import Cluster
    from tutti.models.load import load_model
    from tutti.plan.drawing import draw_plan
    from tutti.plan.files import plan_to_document, save_plan
    from tutti.plan.job import Job
    from tutti.plan.uniform import Degrees, default_batch, uniform_plan
    from tutti.schedule.check import require_valid
    from tutti.schedule.schedule import build_schedule

    if uniform is None:
        raise InputError(
            "plan: the search for non-uniform plans is not built yet; "
            "give --uniform tp=…,pp=… for a Megatron-style plan"
        )
    degrees = Degrees.parse(uniform)
    spec, found = load_model(model), Cluster.load(cluster)
    job = build(
        Job,
        {
            "sequence_length": min(4096, spec.max_length)
            if sequence_length is None
            else sequence_length,
            "global_batch": default_batch(found, degrees) if global_batch is None else global_batch,
            "schedule": schedule,
            "precision": precision,
        },
        Place("plan"),
    )
    made = uniform_plan(spec, found, job, degrees)
    require_valid(build_schedule(made))
    if output is not None:
        save_plan(made, output)
    if json:
        print_json({"plan": plan_to_document(made)})
        return
    print_rich(draw_plan(made))
    if output is not None:
        typer.echo(f"written to {output}")
