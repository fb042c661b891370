"""The `tutti` command: registers one file per verb and turns errors into one line.

Verbs import what they need when they run, so that `tutti --help` stays instant.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.main import get_command_name
from typer.models import CommandInfo

from tutti.cli import (
    accelerator,
    calibrate,
    chips,
    cluster,
    comm,
    convert,
    data,
    generate,
    job,
    launch,
    model,
    predict,
    profile,
    report,
    show,
    simulate,
    train,
    validate,
)
from tutti.cli.align import align
from tutti.cli.bench import group
from tutti.cli.dashboard import dashboard
from tutti.cli.doctor import group as doctor_group
from tutti.cli.evaluate import evaluate
from tutti.cli.fabric import group as fabric_group
from tutti.cli.fleet import group as fleet_group
from tutti.cli.plan import plan
from tutti.cli.recipe import recipe
from tutti.cli.serve import serve
from tutti.cli.shared import terminal
from tutti.cli.verbs import LoopGroup
from tutti.errors import TuttiError

COMPLETION = "_TUTTI_COMPLETE"  # set by shells that want to know how a line may go on

app = typer.Typer(
    name="tutti",
    cls=LoopGroup,
    help="Train and serve one large model on every chip you own.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich help costs more start-up time than all the rest
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(accelerator.app, name="accelerator")
app.command()(job.agent)
app.add_typer(align.app, name="align")
app.add_typer(group.app, name="bench")
app.command()(calibrate.calibrate)
app.command()(chips.chips)
app.add_typer(cluster.app, name="cluster")
app.add_typer(job.app, name="job")
app.add_typer(comm.app, name="comm")
app.command()(convert.convert)
app.command()(dashboard.dashboard)
app.add_typer(data.app, name="data")
app.add_typer(doctor_group.app, name="doctor")
app.command()(evaluate.evaluate)
app.add_typer(fabric_group.app, name="fabric")
app.add_typer(fleet_group.app, name="fleet")
app.command()(generate.generate)
app.command()(launch.launch)
app.add_typer(model.app, name="model")
app.command()(plan.plan)
app.command()(predict.predict)
app.command()(profile.profile)
app.add_typer(recipe.app, name="recipe")
app.command()(report.report)
app.command()(serve.serve)
app.command()(show.show)
app.command()(validate.validate)
app.command()(simulate.simulate)
app.command(cls=train.TrainCommand)(train.train)


def _print_version(wanted: bool) -> None:
    if wanted:
        from tutti.version import code_version

        typer.echo(f"tutti {code_version()}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show it.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks (also TUTTI_DEBUG=1).")
    ] = False,
) -> None:
    """Train and serve one large model on every chip you own."""
    del version
    if debug:
        os.environ["TUTTI_DEBUG"] = "1"


def _said(error: OSError) -> str:
    if not isinstance(error, PermissionError) or error.filename is None:
        return f"cannot go on ({error})"
    path = os.fsdecode(error.filename)
    readable = not os.path.isfile(path) or os.access(path, os.R_OK)
    return f"cannot {'write' if readable else 'read'} {path}: permission denied"


def _of_verb(arguments: Sequence[str]) -> typer.Typer:
    """Return the application with the verb alone that comes first; without one, as it is.

    typer reads the options of every verb that it knows before it runs one.
    """
    wanted = arguments[0] if arguments else ""
    commands = [each for each in app.registered_commands if _name(each) == wanted]
    groups = [each for each in app.registered_groups if each.name == wanted]
    if len(commands) + len(groups) != 1 or COMPLETION in os.environ:
        return app
    alone = copy.copy(app)
    alone.registered_commands, alone.registered_groups = commands, groups
    return alone


def _name(command: CommandInfo) -> str:
    if command.name is not None:
        return command.name
    return get_command_name(command.callback.__name__) if command.callback is not None else ""


def run(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a TuttiError is one line on standard error."""
    terminal.prepare()
    try:
        try:
            given = sys.argv[1:] if arguments is None else list(arguments)
            _of_verb(given)(args=given, prog_name="tutti")
        finally:
            sys.stdout.flush()  # while there is still someone to say that it fails
    except TuttiError as error:
        if os.environ.get("TUTTI_DEBUG") == "1":
            raise
        sys.stderr.write(f"tutti: {error}\n")
        sys.exit(error.exit_code)
    except OSError as error:
        if os.environ.get("TUTTI_DEBUG") == "1":
            raise
        terminal.discard_output()
        if not isinstance(error, BrokenPipeError):  # `tutti … | head` is no failure of ours
            sys.stderr.write(f"tutti: {_said(error)}\n")
        sys.exit(1)


if __name__ == "__main__":
    run()
