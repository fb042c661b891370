"""`tutti fabric`: one command per question about a network."""

from __future__ import annotations

import typer

from tutti.cli.fabric.check import check
from tutti.cli.fabric.design import design
from tutti.cli.fabric.probe import probe
from tutti.cli.fabric.simulate import simulate
from tutti.cli.fabric.watch import watch

app = typer.Typer(help="The network between nodes.", no_args_is_help=True)
app.command()(check)
app.command()(design)
app.command()(probe)
app.command()(simulate)
app.command()(watch)


@app.callback()
def _group() -> None:
    """The network between nodes."""
