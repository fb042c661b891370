"""`tutti bench observe`: what it costs to watch a run, and to read what was watched."""

from __future__ import annotations

from dataclasses import asdict

from tutti.cli.shared.output import Json, print_json, print_rich


def observe(json: Json = False) -> None:
    """Time ring, pulse, samplers and store of a rank, and the reading of its series."""
    from rich import box
    from rich.table import Table

    from tutti.bench.watching.watching_cost import watching_figures

    figures = watching_figures()
    if json:
        print_json([asdict(figure) for figure in figures])
        return
    table = Table(title="cost of watching, CPU of one core", box=box.SIMPLE_HEAD)
    table.add_column("what")
    table.add_column("", justify="right")
    table.add_column("bar", justify="right")
    for figure in figures:
        bar = "" if figure.bar is None else f"{figure.bar:g}"
        table.add_row(figure.words, f"{figure.value:.3g}", bar)
    print_rich(table)
