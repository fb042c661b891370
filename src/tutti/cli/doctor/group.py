"""`tutti doctor …`: one verb, one answer. Exit codes: 0 healthy, 1 found, 2 undetermined.

Without one of its verbs it is `check`: `tutti doctor`, `tutti doctor CLUSTER`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from tutti.cli.doctor.answer import print_finding
from tutti.cli.shared.output import Json
from tutti.errors import InputError

_HELP = ("-h", "--help")


class _Doctor(TyperGroup):
    """Takes what is none of its verbs as words of `check`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Put `check` where no verb stands."""
        if not args or (args[0] not in self.commands and args[0] not in _HELP):
            args = ["check", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(help="What is wrong, where, and what to do.", cls=_Doctor)


@app.callback()
def _group() -> None:
    """What is wrong, where, and what to do. Exit codes: 0 healthy, 1 found, 2 undetermined."""


@app.command()
def check(
    cluster: Annotated[
        str | None,
        typer.Argument(help="A cluster file or name: the rates that its NICs should reach."),
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(help="What `tutti profile` wrote, or a shipped one's name; several."),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Test the links that this plan uses, and no others.")
    ] = None,
    all_pairs: Annotated[
        bool, typer.Option("--all-pairs", help="Let every host meet every other.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="One device instead of all here.")] = None,
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse", help="Play eight emulated chips, one of them slow: is it found?"
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Check this machine's chips and, under torchrun, the NICs and links between hosts."""
    from tutti.cli.doctor.check import check as checked
    from tutti.cli.shared.torch_needed import require_torch

    require_torch("doctor check")
    if rehearse:
        from tutti.diagnose.active.rehearsal import rehearsed
        from tutti.diagnose.cluster.answer import check_finding

        notes = ["a rehearsal: eight emulated chips of two kinds, one slowed on purpose"]
        print_finding(check_finding(rehearsed(), None, [], notes), json=json)
    finding = checked(
        cluster, profiles=profile or (), plan=plan, all_pairs=all_pairs, device=device
    )
    if finding is not None:
        print_finding(finding, json=json)


@app.command()
def logs(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Logs, or folders of them; packed ones too.")
    ] = None,
    kernel: Annotated[
        bool, typer.Option("--kernel", help="Also what the kernel of this host says (dmesg).")
    ] = False,
    signatures: Annotated[
        Path | None, typer.Option(help="A YAML file of your own signatures, which go first.")
    ] = None,
    json: Json = False,
) -> None:
    """Say from the logs of any framework why a job failed."""
    from tutti.cli.shared.progress import progress_bar
    from tutti.diagnose.logs.collect import collect
    from tutti.diagnose.logs.kernel_ring import KERNEL, kernel_lines
    from tutti.diagnose.logs.reason import diagnose
    from tutti.diagnose.logs.signatures import own_catalog, with_own_signatures

    if not paths and not kernel:
        raise InputError("doctor logs: name logs or folders of them, or --kernel")
    catalog = own_catalog()
    if signatures is not None:
        catalog = with_own_signatures(catalog, signatures)
    texts = {KERNEL: kernel_lines()} if kernel else {}
    with progress_bar("bytes", "reading", wanted=not json) as update:
        seen = collect(paths or (), catalog, texts=texts, update=update)
    print_finding(diagnose(seen), json=json)


@app.command()
def dumps(
    folder: Annotated[Path, typer.Argument(help="The folder with the dumps of all ranks.")],
    json: Json = False,
) -> None:
    """Say from flight recorders' dumps (NCCL, gloo, rings) which ranks the others wait for."""
    from tutti.diagnose.dumps.folder import diagnose_dump_folder

    print_finding(diagnose_dump_folder(folder), json=json)


@app.command("run")
def run_(
    run: Annotated[
        str,
        typer.Argument(
            help="The output folder of a run, live or over, or HOST:PORT of the "
            "measure.prometheus_port of one that lives."
        ),
    ],
    trace: Annotated[
        Path | None, typer.Option(help="Also write its rings as a Chrome trace.")
    ] = None,
    flight_records: Annotated[
        Path | None,
        typer.Option(help="Also write its rings as PyTorch's flight records, one file per rank."),
    ] = None,
    json: Json = False,
) -> None:
    """Say of a run of ours who hangs, what is slow, and which steps were irregular."""
    from tutti.cli.doctor.rings import write_flight_records, write_trace
    from tutti.diagnose.runs.folder import diagnose_run
    from tutti.diagnose.runs.wire import address_of, diagnose_address

    folder, address = Path(run), address_of(run)
    if address is not None and not folder.exists():
        if trace is not None or flight_records is not None:
            raise InputError(f"{run}: --trace and --flight-records need the run's folder")
        print_finding(diagnose_address(*address), json=json)
    finding = diagnose_run(folder)
    if trace is not None:
        write_trace(folder, trace)
    if flight_records is not None:
        write_flight_records(folder, flight_records)
    print_finding(finding, json=json)


@app.command("burst")
def burst(
    run: Annotated[Path, typer.Argument(help="The output folder of a run that lives.")],
    seconds: Annotated[float, typer.Option(help="For so long, at most 600.")] = 10.0,
    most: Annotated[int, typer.Option(help="Figures to show, those that moved most first.")] = 40,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write every sample as CSV.")
    ] = None,
    json: Json = False,
) -> None:
    """Take the figures of a run's hosts ten times a second for a while."""
    from tutti.cli.doctor.burst import take_burst

    take_burst(run, seconds, most, output, as_json=json)
