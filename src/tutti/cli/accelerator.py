"""`tutti accelerator`: the devices of this machine, their conformance, their fastest operators."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tutti.cli.accelerator_tables import inventory_tables, report_tables, tuning_tables
from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.cli.shared.progress import progress_bar
from tutti.cli.shared.torch_needed import require_torch

if TYPE_CHECKING:
    pass

app = typer.Typer(
    name="accelerator", help="Devices of this machine and their operators.", no_args_is_help=True
)

Device = Annotated[
    str | None, typer.Option("--device", help="A device: cpu, cuda:1, …; default: the best here.")
]


@app.command("list")
def list_(json: Json = False) -> None:
    """List the kinds of devices, and what runs each operator on those that are here."""
    require_torch("accelerator list")
    from tutti.accelerator.inventory import inventory

    entries = list(inventory())
    if json:
        print_json({"kinds": [entry.plain() for entry in entries]})
    else:
        print_rich(*inventory_tables(entries))


@app.command()
def check(
    device: Device = None,
    operator: Annotated[
        list[str] | None, typer.Option("--operator", help="Only this operator (repeatable).")
    ] = None,
    junit: Annotated[
        Path | None, typer.Option("--junit", help="Also write JUnit XML to this file.")
    ] = None,
    json: Json = False,
) -> None:
    """Hold every implementation of every operator against the reference, and check the device."""
    require_torch("accelerator check")
    from tutti import files
    from tutti.accelerator import open_accelerator
    from tutti.accelerator.conformance import check as run_checks

    accelerator = open_accelerator(device)
    with progress_bar("count", "checking", wanted=not json) as progress:
        report = run_checks(accelerator, tuple(operator or ()), progress=progress)
    if junit is not None:
        files.write_text(junit, report.junit())
    if json:
        print_json(report.plain())
    else:
        print_rich(*report_tables(report))
    if not report.passed:
        raise typer.Exit(1)


@app.command()
def tune(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the table goes.")],
    device: Device = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Measure this model's shapes; default: a grid.")
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option("--tokens", min=1, help="Tokens per call (repeatable); default: 8192."),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option("--dtype", help="bf16, fp16 or fp32 (repeatable).")
    ] = None,
    budget: Annotated[
        float, typer.Option("--budget", min=1, help="Seconds after which measuring ends.")
    ] = 120.0,
    json: Json = False,
) -> None:
    """Measure which implementation of each operator is fastest, and write the table."""
    require_torch("accelerator tune")
    from tutti.accelerator import open_accelerator, tuning
    from tutti.accelerator.choices import save

    accelerator = open_accelerator(device)
    plan = tuning.Question(
        model=model, tokens=tuple(tokens or (8192,)), dtypes=tuple(dtype or ("bf16",))
    )
    with progress_bar("count", "measuring", wanted=not json) as progress:
        rows = tuning.measure(accelerator, plan, budget_s=budget, progress=progress)
    choices = tuning.fastest(rows, tuning.ranks(accelerator))
    save(choices, tuning.origin(accelerator, plan), output)
    if json:
        print_json(
            {"chip": accelerator.chip, "file": str(output), "rows": [r.plain() for r in rows]}
        )
    else:
        print_rich(*tuning_tables(rows, output))
