"""`tutti align A B` and `tutti align dump`: the same tokens through two sides, tensor by tensor."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.align.group import CompareByDefault, called_as, refuse_hub_ids
from tutti.cli.shared.output import Json
from tutti.units import many

if TYPE_CHECKING:
    from tutti.cli.align.plan_side import PlanTask
    from tutti.huggingface.comparison import Comparison, ModuleDifference
    from tutti.report.alignment import AlignmentPart

_MOST_ROWS = 24


app = typer.Typer(
    cls=CompareByDefault,
    help="Put the same batch through two sides and name the first module where they part.\n\n"
    "A and B are dumps, model folders that are run on the spot, or plan:FILE, trained for some "
    "steps. The exit code is 1 if they diverge.",
    short_help="The same batch through two sides: where do they part? (tutti align A B)",
    no_args_is_help=True,
)

Device = Annotated[str, typer.Option(help="Where the side runs, as torch calls it.")]
Sequences = Annotated[int, typer.Option(min=1, help="Sequences in the batch.")]
Length = Annotated[int, typer.Option(min=2, help="Tokens per sequence.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the batch's tokens.")]
Gradients = Annotated[bool, typer.Option(help="Run backward, too.")]
Steps = Annotated[int, typer.Option(min=1, help="Of a plan: optimizer steps.")]
Model = Annotated[
    str | None, typer.Option(help="Of a plan: a model folder or a name, if not the plan's own.")
]
Data = Annotated[
    list[str] | None,
    typer.Option(help="Of a plan: files to train on; left out: synthetic. May be repeated."),
]
Config = Annotated[
    Path | None, typer.Option(help="Of a plan: a training file, for data, optimizer and seed.")
]


@app.command()
def dump(
    folder: Annotated[
        str, typer.Argument(help="A model folder with weights, or plan:FILE: train under a plan.")
    ],
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
    steps: Steps = 2,
    model: Model = None,
    data: Data = None,
    config: Config = None,
) -> None:
    """Run one side on a seeded batch and keep what each module computes."""
    from tutti.cli.align.plan_side import PlanTask, plan_of_side, run_plan

    plan = plan_of_side(folder)
    if plan is None:
        _dump(Path(folder), output, side, dtype, device, sequences, length, seed, gradients)
    else:
        files = tuple(data or ())
        task = PlanTask(steps=steps, model=model, data=files, config=config, seed=seed)
        run_plan(plan, task, output)
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
    from tutti.huggingface.alignment_sides import Task, register_side, write_dump
    from tutti.huggingface.dtypes import weight_dtype
    from tutti.huggingface.dumps import Batch
    from tutti.models import load_model

    register_side("tutti", "tutti.cli.align.own_side:run")
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
    a: Annotated[str, typer.Argument(help="A dump, a model folder to run, or plan:FILE.")],
    b: Annotated[str, typer.Argument(help="Another one.")],
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
    steps: Steps = 2,
    model: Model = None,
    data: Data = None,
    config: Config = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Relative L2 allowed, instead of the formats' own.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained page.")] = None,
    json: Json = False,
) -> None:
    """Compare two dumps; exit with 1 if they diverge, naming the first module that does."""
    from tutti.cli.align.plan_side import PlanTask, check_alike, plan_of_side
    from tutti.cli.shared.output import print_json, print_rich
    from tutti.errors import InputError
    from tutti.huggingface.comparison import compare as run

    if tolerance is not None and not 0 <= tolerance < float("inf"):
        raise InputError(f"--tolerance is {tolerance:g}; give a number such as 1e-4")
    refuse_hub_ids(a, b)
    task = PlanTask(steps=steps, model=model, data=tuple(data or ()), config=config, seed=seed)
    plans = plan_of_side(a), plan_of_side(b)
    if plans[0] is not None and plans[1] is not None:
        check_alike((plans[0], plans[1]))
        if side or dtype:
            raise InputError("--side, --dtype: go with model folders; a plan has its own precision")
    with tempfile.TemporaryDirectory() as scratch, called_as(scratch, a, b):
        dumps = []
        for index, text in enumerate((a, b)):
            target = Path(scratch) / "ab"[index]
            if _is_run(Path(text)):
                named, kinds = _nth(side, index, "hf"), _nth(dtype, index, "fp32")
                _dump(Path(text), target, named, kinds, device, sequences, length, seed, gradients)
            elif not _train(text, task, target):
                target = Path(text)
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


def _is_run(path: Path) -> bool:
    """Tell whether a side is a model folder, which is run on the spot."""
    return (path / "config.json").is_file() and not (path / "dump.json").is_file()


def _train(side: str, task: PlanTask, target: Path) -> bool:
    """Write the dump of a side that is a plan, or what the ranks of a run left of its steps."""
    from tutti.cli.align.plan_side import plan_of_side, run_plan

    plan = plan_of_side(side)
    if plan is not None:
        run_plan(plan, task, target)
        return True
    from tutti.train.run.planning import STEPS_FILE

    if not (Path(side) / STEPS_FILE).is_file():
        return False
    from tutti.train.run.step_dump import write_step_dump

    write_step_dump(Path(side), target, side=Path(side).name)
    return True


def _nth(values: list[str] | None, index: int, default: str) -> str:
    """Return A's or B's value of an option that may be given once for both."""
    if not values:
        return default
    return values[min(index, len(values) - 1)]


def _called(result: Comparison) -> tuple[str, str]:
    a, b = result.a, result.b
    models = (f"{a.model}, ", f"{b.model}, ") if a.model != b.model else ("", "")
    return (
        f"{models[0]}{a.side} {a.dtype} on {a.device}",
        f"{models[1]}{b.side} {b.dtype} on {b.device}",
    )


def _batch(result: Comparison) -> str:
    a = result.a
    times = f"{many(a.steps, 'step')} of " if a.steps else ""
    return f"{times}{many(a.sequences, 'sequence')} of {many(a.length, 'token')}, seed {a.seed}"


def _document(result: Comparison) -> dict[str, Any]:
    from tutti import document
    from tutti.huggingface.comparison import Key

    first = result.first_divergence
    where = Key.parse(first.key) if first is not None else None
    return {
        "a": document.plain(result.a),
        "b": document.plain(result.b),
        "diverges": first is not None,
        "first_divergence": first.key if first is not None else None,
        "first_step": where.step if where is not None else None,
        "first_unit": where.unit if where is not None else None,
        "losses": [{"step": step, "a": a, "b": b} for step, a, b in result.losses],
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
        "noise": list(result.noise),
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
        *_losses(result),
        *_noise(result),
        _verdict(result),
    ]


def _losses(result: Comparison) -> list[str]:
    if not result.losses:
        return []
    first, last = result.losses[0], result.losses[-1]
    if len(result.losses) == 1:
        return [f"loss: A {first[1]:.6f}, B {first[2]:.6f}"]
    sides = (f"{name} {first[i]:.6f} → {last[i]:.6f}" for i, name in ((1, "A"), (2, "B")))
    return [f"loss of steps {first[0]} to {last[0]}: {', '.join(sides)}"]


def _noise(result: Comparison) -> list[str]:
    if not any("/weight/" in module.key for module in result.modules) or not result.noise:
        return []
    names = ", ".join(result.noise[:3]) + (", …" if len(result.noise) > 3 else "")
    return [f"weights not compared where the gradient is rounding noise: {names}"]


def _verdict(result: Comparison) -> str:
    from tutti.huggingface.comparison import Key

    first = result.first_divergence
    counted = "tensors" if result.a.steps else "modules and gradients"
    if first is None:
        return f"no divergence in {len(result.modules)} {counted}"
    where = Key.parse(first.key)
    place = "" if where.step is None else f" (step {where.step}"
    place += "" if not place else ")" if where.unit is None else f", unit {where.unit})"
    return (
        f"first to diverge: {first.key}{place}, relative L2 {first.relative_l2:.2e}, allowed "
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
    from tutti.report.alignment import write_alignment_page

    missing = (("A", result.only_a), ("B", result.only_b))
    notes = [f"only in {name}: {', '.join(keys[:8])}" for name, keys in missing if keys]
    write_alignment_page(
        path,
        model=result.a.model if result.a.model == result.b.model else "",
        sides=_called(result),
        batch=_batch(result),
        parts=_parts(result),
        notes=[*notes, *_noise(result)],
        losses=result.losses,
    )


def _parts(result: Comparison) -> list[AlignmentPart]:
    """Return the tables of the page: forward and gradients, or the steps of training."""
    from tutti.report.alignment import AlignmentPart, AlignmentRow

    headings = {"forward": "Forward", "gradient": "Gradients"}
    if result.a.steps:
        headings = {f"step-{number}": f"Step {number}" for number in range(result.a.steps + 1)}
        headings["step-0"] = "Start"

    def rows(prefix: str) -> list[AlignmentRow]:
        return [
            AlignmentRow(
                name=module.key if result.a.steps else module.key.removeprefix(f"{prefix}/"),
                cosine=module.cosine,
                max_abs=module.max_abs,
                relative_l2=module.relative_l2,
                tolerance=module.tolerance,
            )
            for module in result.modules
            if module.key.startswith(f"{prefix}/")
        ]

    return [AlignmentPart(heading=text, rows=rows(prefix)) for prefix, text in headings.items()]
