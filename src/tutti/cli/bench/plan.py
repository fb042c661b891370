"""`tutti bench plan`: the planner on the published instances, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.bench.plan_instances import INSTANCES, OPT_SIZES, QUICK
from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.cli.shared.progress import ProgressLine
from tutti.errors import InputError, TuttiError, hint

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

Row = dict[str, Any]


Instances = Annotated[
    list[str] | None,
    typer.Argument(help=f"Some of {', '.join(INSTANCES)}.", metavar="[INSTANCES]"),
]
Everything = Annotated[bool, typer.Option("--all", help="All instances, not only the quick ones.")]
Placement = Annotated[
    bool, typer.Option("--placement", help="What placing the ranks is worth, instead.")
]
Opt = Annotated[
    Path | None,
    typer.Option(
        help="OPT-350M on the layer profiles in this folder, beside Metis, instead.",
        metavar="DIR",
    ),
]
Drawn = Annotated[
    int | None,
    typer.Option(
        help="Judge the plans of so many drawn questions, instead; -o makes it resumable.",
        metavar="N",
    ),
]
Only = Annotated[int | None, typer.Option(help="With --drawn: this question only.", metavar="N")]
CpuSeconds = Annotated[
    float, typer.Option(help="With --drawn: for the search of single changes, per question.")
]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="Write the rows as JSON.")]


def plan(
    instances: Instances = None,
    everything: Everything = False,
    placement: Placement = False,
    opt: Opt = None,
    drawn: Drawn = None,
    only: Only = None,
    cpu_seconds: CpuSeconds = 30.0,
    output: Output = None,
    json: Json = False,
) -> None:
    """Plan published instances: CPU seconds, memory, gap, efficiency, against uniform plans."""
    others = [placement, opt is not None, drawn is not None]
    names = _names(instances or [], everything=everything, other=any(others))
    if sum(others) > 1:
        raise InputError("--placement, --opt and --drawn are benchmarks of their own; give one")
    if only is not None and drawn is None:
        raise InputError("--only names one of the questions of --drawn; give both")
    if output is not None and not output.parent.is_dir():
        raise InputError(f"{output}: cannot be written (there is no folder {output.parent})")
    if drawn is not None:
        from tutti.cli.bench.drawn import judge_drawn

        judge_drawn(drawn, only, cpu_seconds, output, as_json=json)
        return
    rows, table = _rows(names, placement=placement, opt=opt, quiet=json)
    document = {"rows": rows}
    if output is not None:
        from tutti.files import pretty_json, write_text

        write_text(output, pretty_json(document) + "\n")
    if json:
        print_json(document)
    else:
        print_rich(table)
        for line in filter(None, map(_below, rows)):
            typer.echo(line)
        if output is not None:
            typer.echo(f"written to {output}")
    failed = [row["instance"] for row in rows if "why" in row]
    if failed:
        raise TuttiError(f"bench plan: no answer for {', '.join(failed)}")


def _names(given: list[str], *, everything: bool, other: bool) -> list[str]:
    for name in given:
        if name not in INSTANCES:
            raise InputError(f"bench plan: no instance '{name}'; {hint(name, INSTANCES)}")
    if other and (given or everything):
        raise InputError("bench plan: --placement, --opt and --drawn have instances of their own")
    if given and everything:
        raise InputError("bench plan: --all already names every instance")
    return list(dict.fromkeys(given)) or list(INSTANCES if everything else QUICK)


def _rows(
    names: Sequence[str], *, placement: bool, opt: Path | None, quiet: bool
) -> tuple[list[Row], RenderableType]:
    if placement:
        from rich.console import Group

        from tutti.bench.plan_placement import (
            placement_table,
            ratio_table,
            run_placement,
            run_ratios,
        )

        with ProgressLine("placing", wanted=not quiet):
            rows, ratios = run_placement(), run_ratios()
        return rows + ratios, Group(placement_table(rows), ratio_table(ratios))
    if opt is not None:
        from tutti.bench.plan_opt import opt_table
        from tutti.cost.measured.layer_profiles import LayerProfiles

        LayerProfiles.load(opt)  # what is wrong with the folder is said once, before anything runs
        rows = [_in_its_own_process(f"OPT-{size}", opt, quiet=quiet) for size in OPT_SIZES]
        return rows, opt_table(rows)
    rows = [_in_its_own_process(name, quiet=quiet) for name in names]
    return rows, plan_table(rows)


def _in_its_own_process(name: str, folder: Path | None = None, *, quiet: bool) -> Row:
    command = [sys.executable, "-m", "tutti.bench.plan_worker", name]
    command += [str(folder)] if folder is not None else []
    with ProgressLine(f"planning {name}", wanted=not quiet):
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"instance": name, "why": f"ended with code {done.returncode} ({last})"}
    row: Row = json.loads(done.stdout)
    return row


def plan_table(rows: Sequence[Row]) -> Table:
    """Return the figures of all instances, with the bar of each."""
    from rich import box
    from rich.table import Table

    title = "CPU seconds of one core, comparisons included; efficiency also with ½ of the links"
    table = Table(box=box.SIMPLE, title=title, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("instance", no_wrap=True)
    for name in ("CPU", "MiB", "step", "MFU", "gap", "efficiency", "½ links", "uniform",
                 "speed-up", "re-plan"):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(_cells(row) if "why" not in row else (row["instance"], *"–" * 10)))
    return table


def _below(row: Row) -> str:
    """Return what is said of a row below the table."""
    if "why" in row:
        return f"{row['instance']}: {row['why']}"
    if "stages" in row:
        return f"{row['instance']}: {'; '.join(row['stages'])}"
    if "instance" not in row:
        return ""
    nominal = f"; nominal: {', '.join(row['nominal'])}" if row["nominal"] else ""
    memory = ", ".join(row["unlimited_memory"])
    note = f"; * alone with unlimited memory: {memory}" if memory else ""
    return f"{row['instance']} (bar: {row['bar']}{nominal}{note}): {row['summary']}"


def _cells(row: Row) -> list[str]:
    def number(key: str, form: str) -> str:
        value = row.get(key)
        return "–" if value is None else form.format(value)

    marked = "*" if row["unlimited_memory"] else ""
    again = number("replan_cpu_s", "{:.2f} s") + number("replan_step_time_s", " → {:.4g} s").strip(
        "–"
    )
    return [
        row["instance"],
        number("search_cpu_s", "{:.2f} s"),
        number("peak_mib", "{:,.0f}"),
        number("step_time_s", "{:.4g} s"),
        number("mfu", "{:.1%}"),
        number("gap_pct", "{:.1f} %"),
        number("mixed_efficiency_pct", "{:.1f} %") + marked,
        number("efficiency_half_links_pct", "{:.1f} %"),
        number("uniform_step_time_s", "{:.4g} s"),
        number("speedup", "{:.2f}×"),
        again,
    ]
