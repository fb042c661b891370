"""`tutti align A B` and `tutti align dump`: the same batch through two sides, module by module."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from tutti.cli.output import Json

if TYPE_CHECKING:
    from tutti.huggingface.comparison import Comparison, ModuleDifference

_MOST_ROWS = 24


class _CompareByDefault(TyperGroup):
    """Reads `tutti align A B` as `tutti align compare A B`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        plain = [argument for argument in args if not argument.startswith("-")]
        if plain and plain[0] not in self.commands:
            args = ["compare", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_CompareByDefault,
    help="The same batch through two sides: where do they part? (tutti align A B)",
    no_args_is_help=True,
)

Device = Annotated[str, typer.Option(help="Where the side runs, as torch calls it.")]
Sequences = Annotated[int, typer.Option(min=1, help="Sequences in the batch.")]
Length = Annotated[int, typer.Option(min=2, help="Tokens per sequence.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the batch's tokens.")]
Gradients = Annotated[bool, typer.Option(help="Run backward, too.")]


@app.command()
def dump(
    folder: Annotated[Path, typer.Argument(help="A model folder with weights.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The dump folder to write.")],
    side: Annotated[
        str, typer.Option(help="What runs it: hf is transformers, tutti our own model.")
    ] = "hf",
    dtype: Annotated[str, typer.Option(help="fp32, fp16 or bf16.")] = "fp32",
    device: Device = "cpu",
    sequences: Sequences = 2,
    length: Length = 32,
    seed: Seed = 0,
    gradients: Gradients = True,
) -> None:
    """Run one side on a seeded batch and keep what each module computes."""
    _dump(folder, output, side, dtype, device, sequences, length, seed, gradients)
    typer.echo(f"written to {output}")


def _dump(
    folder: Path,
    output: Path,
    side: str,
    dtype: str,
    device: str,
    sequences: int,
    length: int,
    seed: int,
    gradients: bool,
) -> None:
    from tutti.huggingface.dtypes import weight_dtype
    from tutti.huggingface.dumps import Batch
    from tutti.huggingface.sides import Task, register_side, write_dump
    from tutti.models import load_model

    register_side("tutti", "tutti.cli.align_side:run")
    kind = weight_dtype(dtype)
    spec = load_model(f"{folder}/")
    batch = Batch.seeded(spec, sequences=sequences, length=length, seed=seed)
    task = Task(
        folder=folder,
        spec=spec,
        batch=batch,
        dtype=kind.name,
        device=device,
        gradients=gradients,
    )
    write_dump(side, task, output)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="A dump, or a model folder to run.")],
    b: Annotated[Path, typer.Argument(help="Another one.")],
    side: Annotated[
        list[str] | None, typer.Option(help="What runs a model folder; twice: of A and of B.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="fp32, fp16 or bf16; twice: of A and of B.")
    ] = None,
    device: Device = "cpu",
    sequences: Sequences = 2,
    length: Length = 32,
    seed: Seed = 0,
    gradients: Gradients = True,
    tolerance: Annotated[
        float | None, typer.Option(help="Relative L2 allowed, instead of the formats' own.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained page.")] = None,
    json: Json = False,
) -> None:
    """Compare two dumps; exit with 1 if they diverge, naming the first module that does."""
    from tutti.cli.output import print_json, print_rich
    from tutti.errors import InputError
    from tutti.huggingface.comparison import compare as run

    if tolerance is not None and not 0 <= tolerance < float("inf"):
        raise InputError(f"--tolerance is {tolerance:g}; give a number such as 1e-4")
    with tempfile.TemporaryDirectory() as scratch:
        dumps = []
        for index, path in enumerate((a, b)):
            if (path / "dump.json").is_file() or not (path / "config.json").is_file():
                dumps.append(path)
                continue
            target = Path(scratch) / "ab"[index]
            named, kinds = _nth(side, index, "hf"), _nth(dtype, index, "fp32")
            _dump(path, target, named, kinds, device, sequences, length, seed, gradients)
            dumps.append(target)
        result = run(dumps[0], dumps[1], tolerance=tolerance)
    if html is not None:
        _write_page(html, result)
    if json:
        print_json(_document(result))
    else:
        print_rich(*_rendered(result))
        if html is not None:
            typer.echo(f"written to {html}")
    if result.first_divergence is not None:
        raise typer.Exit(1)


def _nth(values: list[str] | None, index: int, default: str) -> str:
    """Return A's or B's value of an option that may be given once for both."""
    if not values:
        return default
    return values[min(index, len(values) - 1)]


def _called(result: Comparison) -> tuple[str, str]:
    a, b = result.a, result.b
    return f"{a.side} {a.dtype} on {a.device}", f"{b.side} {b.dtype} on {b.device}"


def _batch(result: Comparison) -> str:
    a = result.a
    return f"{a.sequences} sequences of {a.length} tokens, seed {a.seed}"


def _document(result: Comparison) -> dict[str, Any]:
    from tutti import document

    first = result.first_divergence
    return {
        "a": document.plain(result.a),
        "b": document.plain(result.b),
        "diverges": first is not None,
        "first_divergence": first.key if first is not None else None,
        "modules": [
            {
                "key": module.key,
                "cosine": module.cosine,
                "max_abs": module.max_abs,
                "relative_l2": module.relative_l2,
                "tolerance": module.tolerance,
                "diverges": module.diverges,
            }
            for module in result.modules
        ],
        "only_a": list(result.only_a),
        "only_b": list(result.only_b),
    }


def _rendered(result: Comparison) -> list[Any]:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("module")
    for heading in ("relative L2", "tolerance", "max abs", "cosine"):
        table.add_column(heading, justify="right")
    table.add_column("")
    shown = _shown(result)
    for module in shown:
        table.add_row(
            module.key,
            f"{module.relative_l2:.2e}",
            f"{module.tolerance:.0e}",
            f"{module.max_abs:.2e}",
            f"{module.cosine:.8f}",
            "[bold red]diverges[/bold red]" if module.diverges else "",
        )
    sides = _called(result)
    rest = len(result.modules) - len(shown)
    missing = [
        f"only in {n}: {len(k)}"
        for n, k in zip("AB", (result.only_a, result.only_b), strict=True)
        if k
    ]
    return [
        f"[bold]{result.a.model}[/bold] · A {sides[0]} · B {sides[1]} · {_batch(result)}",
        table,
        *([f"… and {rest} more, all closer (--json, --html)"] if rest else []),
        *missing,
        _verdict(result),
    ]


def _verdict(result: Comparison) -> str:
    first = result.first_divergence
    if first is None:
        return f"no divergence in {len(result.modules)} modules and gradients"
    return (
        f"first to diverge: {first.key}, relative L2 {first.relative_l2:.2e}, allowed "
        f"{first.tolerance:.0e}"
    )


def _shown(result: Comparison) -> list[ModuleDifference]:
    """Return what fits: the first that diverges and the furthest apart, in order of execution."""
    if len(result.modules) <= _MOST_ROWS:
        return list(result.modules)
    first = result.first_divergence
    by_share = sorted(result.modules, key=lambda m: -m.relative_l2 / m.tolerance)
    chosen = {module.key for module in by_share[: _MOST_ROWS - 1]}
    chosen |= {first.key} if first is not None else set()
    return [module for module in result.modules if module.key in chosen]


def _write_page(path: Path, result: Comparison) -> None:
    from tutti.report.alignment import AlignmentPart, AlignmentRow, write_alignment_page

    def part(heading: str, prefix: str) -> AlignmentPart:
        rows = [
            AlignmentRow(
                name=module.key.removeprefix(prefix),
                cosine=module.cosine,
                max_abs=module.max_abs,
                relative_l2=module.relative_l2,
                tolerance=module.tolerance,
            )
            for module in result.modules
            if module.key.startswith(prefix)
        ]
        return AlignmentPart(heading=heading, rows=rows)

    missing = (("A", result.only_a), ("B", result.only_b))
    notes = [f"only in {name}: {', '.join(keys[:8])}" for name, keys in missing if keys]
    write_alignment_page(
        path,
        model=result.a.model,
        sides=_called(result),
        batch=_batch(result),
        parts=(part("Forward", "forward/"), part("Gradients", "gradient/")),
        notes=notes,
    )
