"""`tutti comm explain PLAN`: the collectives of a plan, their programs, and what else could run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tutti.cli.shared.output import print_json, print_rich
from tutti.units import bytes_text, many, seconds_text

if TYPE_CHECKING:
    from tutti.cost.network.recorded_programs import Asked
    from tutti.plan.plan import Plan
    from tutti.simulate.measured import CollectiveRun

_OTHERS = 3  # alternatives in the table; --json has all


def is_plan(path: Path) -> bool:
    """Tell whether a file is a plan, whatever its version."""
    from tutti.files import parse_json

    if path.suffix != ".json" or not path.is_file():
        return False
    value = parse_json(path.read_text(encoding="utf-8"), path.name)
    return isinstance(value, dict) and str(value.get("format", "")).startswith("tutti-plan/")


def explain_plan(path: Path, op: str | None, trace: Path | None, *, json: bool) -> None:
    """Print each collective that the plan's prices know of, and those that a traced step ran."""
    from tutti.cost.plan.plan_costs import price_schedule
    from tutti.plan.check import embedded_cluster, embedded_model, require_valid
    from tutti.plan.files import load_plan
    from tutti.schedule.schedule import build_schedule
    from tutti.simulate.measured import read_measured
    from tutti.simulate.program import compile_schedule

    plan = load_plan(path)
    model, cluster = embedded_model(plan), embedded_cluster(plan)
    require_valid(plan, model, cluster)
    schedule = build_schedule(plan)
    ran: tuple[CollectiveRun, ...] = ()
    if trace is not None:
        ran = read_measured(trace, compile_schedule(schedule)).collectives
    asked = price_schedule(schedule, model, cluster).asked
    rows = [_row(plan, same) for same in _alike(asked) if op in (None, same[0].operation)]
    ran = tuple(run for run in ran if op in (None, run.operation))
    if json:
        document: dict[str, Any] = {"plan": path.name, "collectives": rows}
        print_json(document | ({"ran": [asdict(run) for run in ran]} if trace else {}))
        return
    if rows:
        _print(rows)
    else:
        typer.echo("no collective: nothing is shared between ranks outside of blocks")
    if trace is not None:
        _print_ran(ran)


def _alike(asked: tuple[Asked, ...]) -> list[list[Asked]]:
    """Return collectives by use, operation, kind of group and program; each list by size."""
    alike: dict[object, list[Asked]] = {}
    for one in sorted(asked, key=lambda a: (a.use, a.operation.value, a.kind, a.num_bytes)):
        program = (one.choice.algorithm, one.choice.chunks)
        alike.setdefault((one.use, one.operation, one.kind, program), []).append(one)
    return list(alike.values())


def _row(plan: Plan, same: list[Asked]) -> dict[str, Any]:
    """Return one line: the largest of alike collectives stands for all."""
    from tutti.cost.network.program_choice import choose_program
    from tutti.cost.network.recorded_programs import Recorded

    one, kind = same[-1], same[-1].kind
    free = choose_program(one.operation, one.num_bytes, one.links, one.efficiency)
    recorded = Recorded(plan).find(one.use, one.operation, kind, one.num_bytes) is not None
    return {
        "use": one.use,
        "operation": one.operation.value,
        "pools": list(kind.pools),
        "ranks": kind.ranks,
        "islands": kind.islands,
        "bytes": [same[0].num_bytes, one.num_bytes],
        "algorithm": one.choice.algorithm,
        "chunks": one.choice.chunks,
        "seconds": one.choice.seconds,
        "recorded": recorded,
        "alternatives": [
            {"algorithm": name, "chunks": chunks, "seconds": seconds}
            for name, chunks, seconds in free.alternatives
            if name != one.choice.algorithm
        ],
    }


def _sizes(low: float, high: float) -> str:
    return bytes_text(high) if low == high else f"{bytes_text(low)} – {bytes_text(high)}"


def _print(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table

    from tutti.plan.drawing import program_text

    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("use", "group", "bytes", "program", "said by", "seconds"):
        table.add_column(name, justify="right" if name in ("bytes", "seconds") else "left")
    for row in rows:
        table.add_row(
            f"{row['use']}: {row['operation']}",
            f"{row['ranks']:,} in {many(row['islands'], 'island')}",
            _sizes(*row["bytes"]),
            program_text(row["algorithm"], row["chunks"]),
            "plan" if row["recorded"] else "cost",
            seconds_text(row["seconds"]),
        )
        others = row["alternatives"][:_OTHERS]
        for number, other in enumerate(others):
            table.add_row(
                "",
                f"of {' + '.join(row['pools'])}" if number == 0 else "",
                "",
                f"  {program_text(other['algorithm'], other['chunks'])}",
                "",
                seconds_text(other["seconds"]),
                style="dim",
                end_section=number == len(others) - 1,
            )
    print_rich(table)


def _print_ran(runs: tuple[CollectiveRun, ...]) -> None:
    from rich import box
    from rich.table import Table

    from tutti.plan.drawing import program_text

    table = Table(box=box.SIMPLE, title="ran in the traced step")
    for name in ("use", "operation", "ranks", "bytes", "program", "said by", "calls"):
        table.add_column(name, justify="right" if name in ("bytes", "calls") else "left")
    for run in runs:
        ranks = ", ".join(map(str, run.ranks[:8])) + (" …" if len(run.ranks) > 8 else "")
        program = program_text(run.algorithm, run.chunks)
        size, calls = bytes_text(run.bytes), str(run.calls)
        table.add_row(run.use, run.operation, ranks, size, program, run.by, calls)
    print_rich(table)
