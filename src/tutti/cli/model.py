"""`tutti model …`: what tutti knows of models, and models made of others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.shared.output import Json
from tutti.cli.shared.progress import progress_bar
from tutti.cli.shared.torch_needed import require_torch
from tutti.units import many

if TYPE_CHECKING:
    from tutti.huggingface.conversion import Conversion
    from tutti.models.summary import ModelSummary, UnitRow

_MOST_ROWS = 12

app = typer.Typer(
    help="Models: what a config.json says, in units; and models made of others.",
    no_args_is_help=True,
)
Folder = Annotated[Path, typer.Argument(help="A Hugging Face folder or a tutti folder.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="The Hugging Face folder to write.")]


@app.command("list")
def list_models(json: Json = False) -> None:
    """List the models that ship with tutti and the model types it reads."""
    from tutti.cli.shared.output import print_json, print_rich
    from tutti.models import catalog_names, load_model
    from tutti.models.families import model_types
    from tutti.units import count_text

    models = [load_model(name) for name in catalog_names()]
    if json:
        rows = [
            {
                "name": spec.name,
                "model_type": spec.model_type,
                "parameters": spec.num_parameters,
                "activated": spec.num_activated,
            }
            for spec in models
        ]
        print_json({"models": rows, "model_types": list(model_types())})
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("model", "type", "parameters", "activated", "layers", "hidden"):
        table.add_column(heading, justify="left" if heading in ("model", "type") else "right")
    for spec in models:
        sparse = spec.num_activated != spec.num_parameters
        table.add_row(
            spec.name,
            spec.model_type,
            count_text(spec.num_parameters),
            count_text(spec.num_activated) if sparse else "",
            str(spec.num_layers),
            str(spec.hidden),
        )
    print_rich(table, f"\ntypes: {', '.join(model_types())}")


@app.command()
def show(
    model: Annotated[
        str, typer.Argument(help="A model folder, a config.json, or a name from the catalog.")
    ],
    sequence_length: Annotated[
        int | None, typer.Option("--sequence-length", "-s", help="Tokens per sequence.")
    ] = None,
    recompute: Annotated[
        str, typer.Option(help="Activations kept with recompute none, selective or full.")
    ] = "none",
    prediction_heads: Annotated[
        int, typer.Option(min=0, max=64, help="Extra multi-token prediction heads to train.")
    ] = 0,
    json: Json = False,
) -> None:
    """Show a model: its size, and parameters, FLOPs and bytes per unit."""
    from dataclasses import asdict
    from typing import cast

    from tutti.cli.shared.output import print_json, print_rich
    from tutti.errors import InputError
    from tutti.models import Recompute, load_model
    from tutti.models.summary import summarise

    if sequence_length is not None and not 1 <= sequence_length <= 2**28:
        raise InputError(f"--sequence-length is {sequence_length}; must be from 1 to {2**28}")
    spec = load_model(model).with_prediction_heads(prediction_heads)
    summary = summarise(spec, sequence_length, cast(Recompute, recompute))
    if json:
        from tutti import document

        print_json({**asdict(summary), "spec": document.plain(spec)})
    else:
        print_rich(*_rendered(summary))


def _merged(summary: ModelSummary) -> list[tuple[str, int, UnitRow]]:
    """Return label, count and row; where kinds alternate all along, each kind stands once."""
    by_kind: dict[str, list[UnitRow]] = {}
    for row in summary.units:
        many = len(summary.units) > _MOST_ROWS
        by_kind.setdefault(row.what if many else str(row.first), []).append(row)
    merged = []
    for rows in by_kind.values():
        first, last = rows[0].first, rows[-1].last
        dash = "–" if len(rows) == 1 else "…"
        label = str(first) if first == last else f"{first}{dash}{last}"
        merged.append((label, sum(row.count for row in rows), rows[0]))
    return merged


def _rendered(summary: ModelSummary) -> list[Any]:
    from rich.table import Table

    from tutti.units import bytes_text, count_text, flops_text

    table = Table(box=None, pad_edge=False)
    table.add_column("units")
    table.add_column("what", overflow="fold")
    for heading in ("parameters", "forward/token", "weights", "kept/sequence"):
        table.add_column(heading, justify="right")
    for units, count, row in _merged(summary):
        each = "" if count == 1 else f"{count} × "
        table.add_row(
            units,
            f"{each}{row.what}",
            count_text(row.parameters),
            flops_text(row.forward_flops_per_token).removesuffix("/s"),
            bytes_text(row.weight_bytes),
            bytes_text(row.activation_bytes),
        )
    activated = (
        f", {count_text(summary.activated)} activated"
        if summary.activated != summary.parameters
        else ""
    )
    experts = f" · {many(summary.experts, 'expert')}" if summary.experts else ""
    kv = "" if summary.kv_heads == summary.heads else f"/{summary.kv_heads}"
    return [
        f"[bold]{summary.name}[/bold] · {summary.model_type} · "
        f"{count_text(summary.parameters)} parameters ({summary.parameters:,}){activated}",
        f"{many(summary.layers, 'layer')} · hidden {summary.hidden} · heads {summary.heads}{kv}"
        f"{experts} · vocabulary {summary.vocab}",
        f"weights {bytes_text(summary.weight_bytes)} in 16 bit · training "
        f"{flops_text(summary.training_flops_per_token).removesuffix('/s')} per token at sequence "
        f"{summary.sequence_length}",
        "",
        table,
    ]


# --- models made of others -------------------------------------------------------------------


@app.command()
def average(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders of one model, two or more.", show_default=False)
    ],
    output: Output,
    weights: Annotated[
        str | None, typer.Option(help="How much each folder counts, with commas: 3,1.")
    ] = None,
    json: Json = False,
) -> None:
    """Write the mean of several checkpoints of one model."""
    from tutti.errors import InputError

    require_torch("model average")
    from tutti.huggingface.surgery import average as run

    try:
        shares = [float(part) for part in weights.split(",")] if weights else []
    except ValueError:
        raise InputError(
            f"--weights is '{weights}'; expected numbers with commas, as in 3,1"
        ) from None
    with progress_bar("bytes", "averaging", wanted=not json) as bar:
        done = run(folders, output, weights=shares, progress=bar)
    _say(done, json=json)


@app.command()
def grow(
    folder: Folder,
    output: Output,
    vocabulary: Annotated[int, typer.Option(help="Tokens that the model is to have.", min=1)],
    json: Json = False,
) -> None:
    """Write a model with more tokens; new rows are the mean of those that are there."""
    require_torch("model grow")
    from tutti.huggingface.surgery import grow as run

    with progress_bar("bytes", "growing", wanted=not json) as bar:
        done = run(folder, output, vocabulary=vocabulary, progress=bar)
    _say(done, json=json)


@app.command()
def stretch(
    folder: Folder,
    output: Output,
    factor: Annotated[float, typer.Option(help="How many times as long the context is to be.")],
    kind: Annotated[str, typer.Option(help="yarn or linear.")] = "yarn",
    json: Json = False,
) -> None:
    """Write a model with longer context: rotary positions stretched in its config.json."""
    require_torch("model stretch")
    from tutti.huggingface.surgery import stretch as run

    with progress_bar("bytes", "stretching", wanted=not json) as bar:
        done = run(folder, output, factor=factor, kind=kind, progress=bar)
    _say(done, json=json)


def _say(done: Conversion, *, json: bool) -> None:
    from tutti.cli.convert import document_of, print_conversion
    from tutti.cli.shared.output import print_json

    if json:
        print_json(document_of(done))
    else:
        print_conversion(done)
