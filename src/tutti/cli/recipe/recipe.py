"""`tutti recipe list|show|copy`: training files that work as they are."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from tutti.cli.shared.output import Json

app = typer.Typer(help="Training files that work as they are.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="A recipe; see `tutti recipe list`.")]


@app.command("list")
def list_recipes(json: Json = False) -> None:
    """List the recipes."""
    from tutti.cli.shared.output import print_json, print_rich
    from tutti.recipes.catalog import find, names

    recipes = [find(name) for name in names()]
    if json:
        print_json({"recipes": [{"name": one.name, "about": one.about} for one in recipes]})
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("recipe")
    table.add_column("what it does")
    for one in recipes:
        table.add_row(one.name, one.about)
    print_rich(table)


@app.command()
def show(name: Name, json: Json = False) -> None:
    """Print a recipe: a training file with a comment on each choice."""
    from tutti.cli.shared.output import print_json
    from tutti.recipes.catalog import find

    recipe = find(name)
    if json:
        print_json({"name": recipe.name, "about": recipe.about, "text": recipe.text})
        return
    typer.echo(recipe.text, nl=False)


@app.command()
def places(
    file: Annotated[Path, typer.Argument(help="A training file with GRPO or RLOO.")],
    json: Json = False,
) -> None:
    """Say which chips answer and which train, and what the other way would come to."""
    from tutti.cli.shared.output import print_json
    from tutti.recipes.reinforcement.asked_places import places_of

    needed = places_of(file)
    if json:
        print_json(needed.to_document())
        return
    for line in needed.lines:
        typer.echo(line)


@app.command()
def copy(
    name: Name,
    folder: Annotated[Path, typer.Argument(help="Where it is written; made if need be.")] = Path(),
    json: Json = False,
) -> None:
    """Write a recipe into a folder, with a tiny model and data to try it on."""
    from tutti.cli.shared.output import print_json
    from tutti.recipes.catalog import copy as copy_recipe
    from tutti.recipes.catalog import find

    recipe = find(name)
    written = copy_recipe(recipe, folder)
    command = recipe.command if folder == Path() else f"cd {quote(str(folder))} && {recipe.command}"
    if json:
        print_json({"written": [str(path) for path in written], "run": command})
        return
    for path in written:
        typer.echo(f"written to {path}")
    typer.echo(f"run: {command}")
