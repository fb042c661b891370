"""`tutti bench`: the benchmarks that the README's figures come from."""

from __future__ import annotations

import typer

from tutti.cli.output import Json, print_json, print_rich

app = typer.Typer(help="Benchmarks behind the README's figures.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Run one of the benchmarks that the README's figures come from."""


@app.command()
def schedule(json: Json = False) -> None:
    """Build and check the schedules of the 1T GPT on 16,384 chips of three makers."""
    import time

    from rich import box
    from rich.table import Table

    from tutti.hardware.cluster import Cluster
    from tutti.models.load import load_model
    from tutti.plan.job import Job, ScheduleKind
    from tutti.plan.uniform import Degrees, uniform_plan
    from tutti.schedule.check import require_valid
    from tutti.schedule.schedule import build_schedule

    model, cluster = load_model("gpt-1t"), Cluster.load("H16384")
    rows: list[dict[str, object]] = []
    for kind, degrees in (
        ("1f1b", "tp=8,pp=64,sp=1"),
        ("1f1b", "tp=8,pp=64,sp=1,shard=1,recompute=full"),
        ("gpipe", "tp=8,pp=64,sp=1"),
        ("interleaved", "tp=8,pp=64,sp=1,vpp=2"),
        ("zero_bubble", "tp=8,pp=64,sp=1"),
    ):
        job = Job(sequence_length=2048, global_batch=16384, schedule=ScheduleKind(kind))
        plan = uniform_plan(model, cluster, job, Degrees.parse(degrees))
        started = time.process_time()
        made = build_schedule(plan)
        built = time.process_time()
        require_valid(made)
        rows.append(
            {
                "schedule": kind,
                "degrees": degrees,
                "classes": len(made.classes),
                "instructions": sum(len(c.instructions) for c in made.classes),
                "build_cpu_s": round(built - started, 3),
                "check_cpu_s": round(time.process_time() - built, 3),
            }
        )
    if json:
        print_json({"model": model.name, "cluster": cluster.name, "rows": rows})
        return
    table = Table(box=box.SIMPLE, title=f"{model.name} on {cluster.name}, CPU seconds of one core")
    for name in rows[0]:
        table.add_column(name, justify="left" if name in ("schedule", "degrees") else "right")
    for row in rows:
        table.add_row(*(f"{v:,}" if isinstance(v, (int, float)) else str(v) for v in row.values()))
    print_rich(table)
