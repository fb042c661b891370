"""`tutti bench`: the benchmarks that the figures of docs/results.md come from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.bench import (
    blocks,
    comm,
    cpu,
    data,
    fabric,
    measuring,
    mixed,
    observe,
    operators,
    overlap,
    plan,
    serve,
    steps,
    storage,
    train,
)
from tutti.cli.shared.output import Json, print_json, print_rich

if TYPE_CHECKING:
    from tutti.cost.arrays import Machine, Shape, Strategy

app = typer.Typer(help="Benchmarks behind the figures of docs/results.md.", no_args_is_help=True)


app.command()(plan.plan)
app.command()(blocks.blocks)
app.command()(operators.operators)
app.command()(comm.comm)
app.command()(cpu.cpu)
app.command()(train.train)
app.command()(data.data)
app.command()(measuring.measuring)
app.command()(mixed.mixed)
app.command()(observe.observe)
app.command()(overlap.overlap)
app.command()(serve.serve)
app.command()(steps.steps)
app.command()(storage.storage)
app.add_typer(fabric.app, name="fabric")


@app.callback()
def bench() -> None:
    """Run one of the benchmarks that the figures of docs/results.md come from."""


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


@app.command()
def predict(
    calculon: Annotated[
        Path | None, typer.Option(help="A checkout of calculon-ai/calculon to time beside us.")
    ] = None,
    json: Json = False,
) -> None:
    """Predict over a million distinct strategies of GPT-3 175B on A100, with peers beside us."""
    from rich import box
    from rich.table import Table

    from tutti.bench import predictors

    rows = _priced_rows()
    rows += [
        {
            "predictor": rate.name,
            "strategies": rate.strategies,
            "cpu_s": round(rate.cpu_s, 3),
            "per_second": round(rate.per_second) if rate.per_second else None,
            "note": rate.note,
        }
        for rate in (predictors.llm_analysis(), predictors.calculon(calculon))
    ]
    if json:
        print_json({"model": "gpt-3-175b", "chip": "A100-80", "rows": rows})
        return
    table = Table(box=box.SIMPLE, title="gpt-3-175b on A100-80, strategies per second of one core")
    for name in rows[0]:
        table.add_column(name, justify="left" if name in ("predictor", "note") else "right")
    for row in rows:
        cells = ("–" if v is None else v if isinstance(v, str) else f"{v:,}" for v in row.values())
        table.add_row(*cells)
    print_rich(table)


def _priced_rows() -> list[dict[str, Any]]:
    """Time our vectorised pricing: the best of three, for other jobs share this machine."""
    import time

    from tutti.cost.constants import Constants
    from tutti.cost.memory.footprint import footprint
    from tutti.cost.step import price

    shape, strategy, machine = _strategies()
    rows = []
    for what, work in (
        ("tutti, seconds", lambda: price(shape, strategy, machine, Constants())),
        ("tutti, bytes", lambda: footprint(shape, strategy)),
    ):
        times = []
        for _ in range(3):
            started = time.process_time()
            work()
            times.append(time.process_time() - started)
        rows.append(
            {
                "predictor": what,
                "strategies": strategy.size,
                "cpu_s": round(min(times), 3),
                "per_second": round(strategy.size / min(times)),
                "note": "vectorised, best of three",
            }
        )
    return rows


def _strategies() -> tuple[Shape, Strategy, Machine]:
    """Return a grid of distinct strategies for GPT-3 175B on 64 nodes of A100."""
    import numpy as np

    from tutti.cost.arrays import Machine, Shape, Strategy
    from tutti.hardware.chip import Dtype
    from tutti.hardware.cluster import Cluster
    from tutti.hardware.library import shipped
    from tutti.hardware.pool import Pool
    from tutti.models.load import load_model

    library = shipped()
    pool = Pool(name="a100", node=library.node_for(library.chips["A100-80"]), nodes=64)
    machine = Machine.of(Cluster(name="bench", pools=(pool,)), pool, Dtype.BF16)
    shape = Shape.of(load_model("gpt-3-175b"), 0)
    axes = (
        (1, 2, 4, 8),  # tp
        (1, 2, 3, 4, 6, 8, 12, 16),  # pp
        range(1, 65),  # dp
        (1, 2, 4, 8),  # sequences
        range(1, 33),  # micro-batches
        (0, 1),  # recompute
        (0, 1, 3),  # shard
    )
    grid = np.meshgrid(*(np.array(axis, dtype=np.float64) for axis in axes), indexing="ij")
    tp, pp, dp, sequences, many, again, shard = (axis.ravel() for axis in grid)
    strategy = Strategy.filled(
        sequence_length=2048,
        tp=tp,
        pp=pp,
        dp=dp,
        num_chips=tp * pp * dp,
        sequences=sequences,
        micro_batches=many,
        recompute_gemm=again,
        recompute_attention=again,
        recompute_elementwise=again,
        recompute_network=again,
        shard=shard,
    )
    return shape, strategy, machine
