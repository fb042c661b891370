"""`tutti convert`: Hugging Face weights in and out, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from tutti.cli.shared.output import Json
from tutti.cli.shared.progress import progress_bar
from tutti.cli.shared.torch_needed import require_torch

if TYPE_CHECKING:
    from tutti.huggingface.conversion import Conversion, Form


Source = Annotated[
    Path, typer.Argument(help="A Hugging Face folder, a tutti folder, or a .gguf file.")
]
To = Annotated[str | None, typer.Option(help="tutti or hf; left out: whichever the source is not.")]
Plan = Annotated[
    Path | None, typer.Option(help="Lay the files of a tutti folder out for this plan.")
]
Dtype = Annotated[str | None, typer.Option(help="Write the weights as fp32, fp16 or bf16; rounds.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with a stopped conversion.")]


def convert(
    source: Source,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")],
    to: To = None,
    plan: Plan = None,
    dtype: Dtype = None,
    resume: Resume = False,
    json: Json = False,
) -> None:
    """Convert weights between Hugging Face's form and tutti's; the source is only read."""
    from tutti.cli.shared.output import print_json
    from tutti.errors import InputError, hint
    from tutti.huggingface.conversion import convert as run
    from tutti.huggingface.dtypes import weight_dtype
    from tutti.plan.files import load_plan

    if dtype is not None:
        require_torch("convert --dtype")
    if to not in (None, "tutti", "hf"):
        raise InputError(f"--to is '{to}'; {hint(to, ('tutti', 'hf'))}")
    planned = load_plan(plan) if plan is not None else None
    wanted = weight_dtype(dtype) if dtype is not None else None
    gguf = source.suffix == ".gguf"
    if gguf and (to == "tutti" or planned is not None or resume):
        raise InputError(
            f"{source}: a GGUF file becomes a Hugging Face folder, at once; convert that one to "
            "tutti's form in a second step"
        )
    with progress_bar("bytes", "converting", wanted=not json) as bar:
        if gguf:
            from tutti.huggingface.gguf_file import convert_gguf

            done = convert_gguf(source, output, dtype=wanted, progress=bar)
        else:
            done = run(
                source,
                output,
                form=cast("Form | None", to),
                plan=planned,
                dtype=wanted,
                resume=resume,
                progress=bar,
            )
    if source.is_dir():
        from tutti.huggingface.side_files import outside_links

        for name in outside_links(source):
            typer.echo(f"note: the link {name} leads outside of {source}; not copied", err=True)
    if json:
        print_json(document_of(done))
    else:
        print_conversion(done)


def document_of(done: Conversion) -> dict[str, Any]:
    """Return what was written as plain values."""
    return {
        "target": str(done.target),
        "form": done.form,
        "model_type": done.model_type,
        "tensors": done.num_tensors,
        "bytes": done.num_bytes,
        "kept": done.kept,
        "files": {
            name: {"bytes": file.num_bytes, "sha256": file.sha256}
            for name, file in done.files.items()
        },
    }


def print_conversion(done: Conversion) -> None:
    """Say what was written."""
    from tutti.units import bytes_text, many

    form = "tutti" if done.form == "tutti" else "Hugging Face"
    kept = f", {done.kept} of them from the run before" if done.kept else ""
    typer.echo(
        f"{done.model_type}: {many(done.num_tensors, 'tensor')}, {bytes_text(done.num_bytes)} in "
        f"{many(len(done.files), 'file')}{kept}"
    )
    typer.echo(f"written to {done.target} ({form} folder)")
