"""`tutti profile`: measure this machine's chip, operator by operator, within a time budget."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.cli.shared.progress import Update, progress_bar
from tutti.cli.shared.torch_needed import require_torch
from tutti.errors import InputError, hint
from tutti.units import many

if TYPE_CHECKING:
    from rich.table import Table

    from tutti.accelerator import Accelerator
    from tutti.accelerator.profiling.cases import ProfileCase
    from tutti.accelerator.profiling.session import Progress, Session
    from tutti.hardware.chip import Dtype
    from tutti.hardware.profile import LinkFigure, Profile

DEFAULT_TOKENS = "2048,8192"


Model = Annotated[
    str | None,
    typer.Argument(
        help="A model whose shapes come first: a Hugging Face folder, a config.json, a name.",
        show_default=False,
    ),
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1, ascend, … (default: the best here).")
]
DtypeOption = Annotated[
    str | None, typer.Option(help="fp32, bf16 or fp16 (default: bf16; fp32 on a cpu).")
]
Tokens = Annotated[
    str,
    typer.Option(
        help="Tokens of a micro-batch at which the model's shapes are measured.", metavar="N,…"
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(help="Of a CPU, as many as a rank will have (default: all cores).", min=1),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Keep what the file holds, and measure the rest.")
]
Serve = Annotated[
    bool,
    typer.Option(
        "--serve",
        help="What servers run instead of what training does: products from one token on, "
        "attention to pages, sampling. With --resume both stand in one profile.",
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--operator",
        help="Measure only this operator (repeatable); with --resume anew, whatever the file holds "
        "of it.",
        show_default=False,
    ),
]
Storage = Annotated[
    Path | None,
    typer.Option(
        help="Measure the storage that this folder lies on, instead of a chip.", metavar="DIR"
    ),
]
Tier = Annotated[
    str,
    typer.Option(help="With --storage: what it is: local_disk, file_system or object_store."),
]
Processes = Annotated[
    int, typer.Option(help="With --storage: measured at 1, 2, 4, … up to so many.", min=1, max=256)
]
FileSize = Annotated[
    str, typer.Option(help="With --storage: bytes of each process's file.", metavar="SIZE")
]
Html = Annotated[
    Path | None, typer.Option(help="Write the matrix as a self-contained page.", metavar="FILE")
]


def profile(
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile to write.")],
    model: Model = None,
    device: Device = None,
    budget: Annotated[str, typer.Option(help="Time to measure for: 120s, 5min.")] = "120s",
    dtype: DtypeOption = None,
    tokens: Tokens = DEFAULT_TOKENS,
    sequence_length: Annotated[int, typer.Option(help="Tokens of a sequence.", min=1)] = 4096,
    threads: Threads = None,
    serve: Serve = False,
    resume: Resume = False,
    operator: Only = None,
    html: Html = None,
    storage: Storage = None,
    tier: Tier = "file_system",
    processes: Processes = 4,
    file_size: FileSize = "256MiB",
    json: Json = False,
) -> None:  # fmt: skip
    """Measure operators, memory, host copies and links of this machine into a profile.

    The most telling shapes come first: whatever was measured when the budget ends is useful. Ctrl-C
    keeps it, too. Under torchrun the links between the ranks are measured as well; rank 0 writes.
    With --storage a disk or file system is measured instead; that needs no torch.
    """
    if storage is not None:
        from tutti.cli.storage.profile import profile_storage

        _require_writable(output)
        profile_storage(
            storage, output, tier=tier, processes=processes, file_size=file_size, json=json
        )
        return
    seconds = _budget(budget)
    counts = _tokens(tokens)
    require_torch("profile")
    _require_writable(output, html)
    _use_threads(threads)
    opened, links, writes = _open(device)
    if not writes:
        return
    chosen = chosen_dtype(dtype, opened)
    known = _resumed(output, opened) if resume else None
    from tutti.accelerator.profiling.request import asked, wanted_cases

    cases = wanted_cases(model, counts, sequence_length, serve=serve)
    cases, known = asked(cases, known, operator or ())
    told = f"{f' {Path(model).name}' if model else ''}{' --serve' if serve else ''}"
    origin = f"tutti profile{told} --budget {budget}"
    session = _session(opened, chosen, cases, seconds, known, links, origin)
    session.save = lambda partial: partial.save(output)
    with progress_bar("seconds", wanted=not json) as bar:
        session.report = functools.partial(_shown, bar)
        from tutti.accelerator.profiling import measure_profile

        measured = measure_profile(session)
    whole = not operator and (serve or (model and session.issues))
    if not session.interrupted and whole:
        measured = _with_whole_blocks(measured, None if serve else model, opened, chosen)
        measured.save(output)
    if html is not None:
        from tutti.report.profile import write_profile_page

        write_profile_page(html, measured)
    _show(measured, session, output, json=json)
    if session.interrupted:
        raise typer.Exit(130)


# --- what was asked --------------------------------------------------------------------------


def _use_threads(count: int | None) -> None:
    if count is not None:
        import torch

        torch.set_num_threads(count)


def _budget(text: str) -> float:
    from tutti.units import parse

    try:
        seconds = parse(text, "s")
    except ValueError as error:
        raise InputError(f"--budget {error}") from None
    if seconds <= 0:
        raise InputError(f"--budget is '{text}'; give a time above 0, such as 120s")
    return seconds


def _tokens(text: str) -> list[int]:
    lengths = []
    for item in text.split(","):
        if not item.strip().isdigit() or int(item) < 1:
            raise InputError(f"--tokens is '{text}'; write whole numbers: {DEFAULT_TOKENS}")
        lengths.append(int(item))
    return lengths


def _require_writable(*paths: Path | None) -> None:
    """Refuse before minutes are spent on what cannot be written."""
    import os

    for path in (p for p in paths if p is not None):
        if path.is_dir():
            raise InputError(f"{path}: is a folder; name a file")
        if not path.parent.is_dir():
            raise InputError(f"{path}: cannot be written (there is no folder {path.parent})")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise InputError(f"cannot write {path}: permission denied")


def _open(device: str | None) -> tuple[Accelerator, list[LinkFigure], bool]:
    """Open the device; with several ranks measure their links, and tell whether this one writes."""
    from tutti.accelerator import open_accelerator
    from tutti.accelerator.find import count
    from tutti.accelerator.profiling import links

    if links.num_ranks() == 1:
        return open_accelerator(device), [], True
    if device is None or ":" not in device:
        first = open_accelerator(device)
        many = count(first.name) > links.local_rank()
        device = (
            f"{first.name}:{links.local_rank()}" if many and first.name != "cpu" else first.name
        )
    opened = open_accelerator(device)
    return opened, links.peer_links(opened), links.rank() == 0


def chosen_dtype(text: str | None, opened: Accelerator) -> Dtype:
    """Return the number format asked for, or the one a device is usually trained in."""
    from tutti.accelerator.profiling.workspace import TORCH_DTYPES
    from tutti.hardware.chip import Dtype

    if text is None:
        return Dtype.FP32 if opened.device.type == "cpu" else Dtype.BF16
    known = [d.value for d in TORCH_DTYPES]
    if text not in known:
        raise InputError(f"--dtype is '{text}'; {hint(text, known)}")
    return Dtype(text)


def _resumed(path: Path, opened: Accelerator) -> Profile | None:
    from tutti.hardware.profile import Profile

    if not path.exists():
        return None
    earlier = Profile.load(path)
    if earlier.chip != opened.chip:
        raise InputError(
            f"--resume: {path} is of '{earlier.chip}', but this is '{opened.chip}'; "
            "choose another file"
        )
    return earlier


def _session(
    opened: Accelerator,
    dtype: Dtype,
    cases: list[ProfileCase],
    budget_s: float,
    known: Profile | None,
    links: list[LinkFigure],
    origin: str,
) -> Session:
    from tutti.accelerator.profiling import Session
    from tutti.accelerator.profiling.timer import describe

    stack = describe(opened)
    if known is not None and known.stack != stack:
        raise InputError(
            f"--resume: the file was measured with '{known.stack}', this is '{stack}'; "
            "choose another file"
        )
    return Session(
        accelerator=opened,
        dtype=dtype,
        cases=cases,
        budget_s=budget_s,
        origin=origin,
        resume=known,
        links=links,
    )


def _with_whole_blocks(
    measured: Profile, model: str | None, opened: Accelerator, dtype: Dtype
) -> Profile:
    """Return the profile with what only a whole block tells; as it is where that fails.

    Of a model's block of training: the host's times. Of servers: what lies between operators.
    """
    from tutti.bench.block_issue import with_block_issue
    from tutti.bench.served_gap import with_served_gap
    from tutti.models.load import load_model

    try:
        if model is None:
            return with_served_gap(measured, opened, dtype)
        return with_block_issue(measured, load_model(model), opened, dtype)
    except Exception as error:  # what was measured is worth keeping
        first = str(error).strip().partition("\n")[0]
        typer.echo(f"no whole block could be timed: {type(error).__name__}: {first}", err=True)
        return measured


# --- what is shown ---------------------------------------------------------------------------


def _shown(bar: Update, progress: Progress) -> None:
    """Show where the session is."""
    again = f", visit {progress.visit}" if progress.visit > 1 else ""
    said = f"{progress.measured} of {many(progress.cases, 'shape')}{again}: {progress.doing}"
    bar(said, min(progress.used_s, progress.budget_s), progress.budget_s)


def _show(measured: Profile, session: Session, output: Path, *, json: bool) -> None:
    refused = {str(case): reason for case, reason in session.refused.items()}
    if json:
        print_json(
            {
                "file": str(output),
                "chip": measured.chip,
                "stack": measured.stack,
                "measurements": len(measured.operators),
                "visits": session.visits,
                "launch_floor_s": measured.launch_floor_s,
                "links": {
                    link.kind: {"latency_s": link.latency_s, "bandwidth": link.bandwidth}
                    for link in measured.links
                },
                "refused": refused,
                "interrupted": session.interrupted,
                "operators": _operator_rows(measured, lambda value: value),
            }
        )
        return
    from tutti.units import rate_text, seconds_text

    print_rich(f"[bold]{measured.chip}[/]  {measured.stack}", _table(measured))
    typer.echo(f"launch floor {seconds_text(measured.launch_floor_s)}")
    for link in measured.links:
        typer.echo(f"{link.kind} {rate_text(link.bandwidth)}, {seconds_text(link.latency_s)}")
    for case, reason in list(refused.items())[:5]:
        typer.echo(f"not measured: {case}: {reason}")
    stopped = " (stopped by Ctrl-C)" if session.interrupted else ""
    typer.echo(f"{many(len(measured.operators), 'measurement')} written to {output}{stopped}")


def _operator_rows(measured: Profile, shown: Callable[[float], object]) -> list[dict[str, object]]:
    """Summarise each operator's pass: shapes, best rate, spread."""
    import statistics

    from tutti.cost.measured.forms import row_elements, row_flops

    groups: dict[tuple[str, Any], list[Any]] = {}
    for row in measured.operators:
        groups.setdefault((row.operator, row.dtype), []).append(row)
    rows: list[dict[str, object]] = []
    for (name, dtype), entries in groups.items():
        flops = max(float(row_flops(name, e.shape)) / e.seconds for e in entries)
        size = 1.0 if name == "copy" else dtype.num_bytes
        moved = max(float(row_elements(name, e.shape)) * size / e.seconds for e in entries)
        rows.append(
            {
                "operator": name,
                "dtype": dtype.value,
                "shapes": len(entries),
                "best_flops": shown(flops) if flops else None,
                "best_bytes_per_s": shown(moved),
                "median_spread": statistics.median(e.spread for e in entries),
                "kernels": sorted({e.kernel for e in entries}),
            }
        )
    return rows


def _table(measured: Profile) -> Table:
    from rich import box
    from rich.table import Table

    from tutti.units import flops_text, rate_text

    table = Table(box=box.SIMPLE, header_style="bold", pad_edge=False)
    table.add_column("operator")
    for name in ("shapes", "best rate", "traffic at best", "spread"):
        table.add_column(name, justify="right")
    table.add_column("kernel")
    for row in _operator_rows(measured, lambda value: value):
        flops, moved = row["best_flops"], row["best_bytes_per_s"]
        table.add_row(
            f"{row['operator']} {row['dtype']}",
            str(row["shapes"]),
            flops_text(float(flops)) if isinstance(flops, float) else "–",
            rate_text(float(moved)) if isinstance(moved, float) else "–",
            f"{row['median_spread']:.1%}",
            ", ".join(row["kernels"]),  # type: ignore[arg-type]
        )
    return table
