"""`tutti fleet`: one command per question about several jobs."""

from __future__ import annotations

import typer

from tutti.cli.fleet.export import export
from tutti.cli.fleet.import_topology import import_topology
from tutti.cli.fleet.mix import mix
from tutti.cli.fleet.place import place
from tutti.cli.fleet.simulate import simulate

app = typer.Typer(help="Several jobs on one cluster.", no_args_is_help=True)
app.command()(export)
app.command("import")(import_topology)
app.command()(mix)
app.command()(place)
app.command()(simulate)


@app.callback()
def _group() -> None:
    """Several jobs on one cluster."""
