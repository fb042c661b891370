"""`tutti bench comm`: collectives on emulated wires or a real cluster, plain gloo beside them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.units import many

if TYPE_CHECKING:
    from tutti.bench.collective_ranks import Outcome
    from tutti.bench.collectives import CollectiveRow
    from tutti.hardware.profile import Profile


Senders = Annotated[
    str, typer.Option(help="TCP congestion control that the bed's hosts have: reno, bbr, …")
]
Device = Annotated[str, typer.Option(help="Under torchrun, where tensors lie: cpu, cuda, npu, …")]
Model = Annotated[
    bool, typer.Option("--model", help="Print the predicted time beside the measured one.")
]
Judge = Annotated[bool, typer.Option("--judge", help="Measure twice: what does the choice lose?")]
Tune = Annotated[
    Path | None, typer.Option(help="Write links and all programs' times to this Profile.")
]


def comm(
    op: Annotated[list[str] | None, typer.Option(help="Which operation; may be repeated.")] = None,
    sizes: Annotated[str, typer.Option(help="Bytes, such as 256K..16M or 1M,3M.")] = "1M..16M",
    bed: Annotated[str, typer.Option(help="An emulated network; see --beds.")] = "pair",
    beds: Annotated[bool, typer.Option("--beds", help="List the emulated networks.")] = False,
    senders: Senders = "reno",
    as_given: Annotated[
        bool, typer.Option("--as-given", help="On a bed: leave ranks in the order they came in.")
    ] = False,
    device: Device = "cpu",
    gloo: Annotated[bool, typer.Option(help="Measure plain gloo beside ours.")] = True,
    repeats: Annotated[int, typer.Option(min=1, help="Samples of each figure.")] = 5,
    every: Annotated[bool, typer.Option("--all", help="Measure all programs worth it.")] = False,
    model: Model = False,
    judge: Judge = False,
    tune: Tune = None,
    profile: Annotated[Path | None, typer.Option(help="Choose by this Profile.")] = None,
    json: Json = False,
) -> None:
    """Time collectives: size, program, algbw, busbw, and the ratio to what the wires allow.

    Under torchrun it measures the cluster it runs on; otherwise an emulated network on this machine
    (Linux, root).
    """
    from tutti.cli.shared.torch_needed import require_torch

    require_torch("bench comm")
    from tutti.bench.collective_ranks import bench_on_bed, bench_under_torchrun
    from tutti.bench.collectives import Options
    from tutti.bench.emulated_network import BEDS
    from tutti.errors import InputError, hint
    from tutti.hardware.profile import Profile

    if beds:
        _list_beds(json)
        return
    options = Options(
        operations=tuple(op or ["all_reduce"]), sizes=parse_sizes(sizes), repeats=repeats,
        all_programs=every or judge or tune is not None, gloo=gloo, device=device,
    )  # fmt: skip
    known = None if profile is None else Profile.load(profile)
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        outcome = bench_under_torchrun(options, profile=known, judge=judge)
        title = f"{many(int(os.environ['WORLD_SIZE']), 'rank')}, tensors on {device}"
        if int(os.environ["RANK"]):
            return  # the first one tells
    elif device != "cpu":
        raise InputError(
            f"--device: '{device}' is measured under torchrun; a bed has tensors of cpu"
        )
    elif bed not in BEDS:
        raise InputError(f"--bed: '{bed}'; {hint(bed, BEDS)}")
    else:
        spec = replace(BEDS[bed], senders=senders, as_given=as_given)
        outcome = bench_on_bed(spec, options, profile=known, judge=judge)
        title = f"bed {bed}: {spec.summary}" + (", as given" if as_given else "")
    if tune is not None:
        tuned_profile(outcome, known, title).save(tune)
    if json:
        print_json(_plain(outcome, title))
    else:
        _print(outcome, title, model)


def parse_sizes(text: str, option: str = "--sizes") -> tuple[int, ...]:
    """Read "256K..16M" (every fourfold) or "1M,3M"."""
    from tutti.errors import InputError

    def one(part: str) -> int:
        units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
        number = part[:-1] if part[-1:] in units else part
        if not number.isdigit() or not int(number):
            raise InputError(f"{option}: '{part}'; write bytes like 256K, 1M or 4194304")
        return int(number) * units.get(part[-1:], 1)

    low, dots, high = text.partition("..")
    if not dots:
        return tuple(one(part.strip()) for part in text.split(","))
    sizes = [one(low)]
    while sizes[-1] * 4 <= one(high):
        sizes.append(sizes[-1] * 4)
    return tuple(sizes)


def _list_beds(json: bool) -> None:
    from tutti.bench.emulated_network import BEDS

    if json:
        print_json({name: spec.summary for name, spec in BEDS.items()})
        return
    for name, spec in BEDS.items():
        typer.echo(f"{name:10} {spec.summary}")


def tuned_profile(outcome: Outcome, known: Profile | None, title: str) -> Profile:
    """Return the Profile with measured links and programs in it."""
    import datetime

    from tutti.hardware.profile import Profile

    base = known or Profile(
        chip="CPU", origin=f"tutti bench comm --tune, {title}", launch_floor_s=0.0
    )
    fresh = {link.kind for link in outcome.links}
    kept = tuple(link for link in base.links if link.kind not in fresh)
    return replace(
        base,
        date=base.date or datetime.date.today().isoformat(),
        links=(*kept, *outcome.links),
        collectives=outcome.collectives,
    )


def _plain(outcome: Outcome, title: str) -> dict[str, Any]:
    return {
        "where": title,
        "rows": [
            {
                "operation": row.operation,
                "bytes": row.bytes,
                "program": row.program,
                "chosen": row.chosen,
                "seconds": row.seconds,
                "predicted_s": row.predicted_s,
                "algbw": row.algbw,
                "busbw": row.busbw,
                "bound_s": row.bound_s,
                "ratio_to_bound": row.ratio,
            }
            for row in outcome.rows
        ],
        "links": {
            link.kind: {"latency_s": link.latency_s, "bandwidth": link.bandwidth}
            for link in outcome.links
        },
        "regrets": {name: list(values) for name, values in outcome.regrets.items()},
        "wire_bytes": outcome.wires,
    }


def _print(outcome: Outcome, title: str, model: bool) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, title=title)
    table.add_column("operation")
    for name in ("bytes", "program", "ms", "algbw MB/s", "busbw MB/s", "÷ bound"):
        table.add_column(name, justify="right")
    if model:
        table.add_column("predicted ms", justify="right")
        table.add_column("error", justify="right")
    for row in outcome.rows:
        table.add_row(*_cells(row, model), style="bold" if row.chosen else None)
    print_rich(table)
    for link in outcome.links:
        typer.echo(f"{link.kind}: {link.latency_s * 1e6:.0f} µs, {link.bandwidth / 1e6:.1f} MB/s")
    for name, values in outcome.regrets.items():
        product = 1.0
        for value in values:
            product *= 1.0 + value
        mean = product ** (1.0 / max(1, len(values))) - 1.0
        typer.echo(
            f"chosen by {name}: {mean:.1%} over the best (geometric mean), worst {max(values):.1%}"
        )


def _cells(row: CollectiveRow, model: bool) -> list[str]:
    cells = [
        row.operation,
        f"{row.bytes:,}",
        row.program,
        f"{row.seconds * 1e3:.1f}",
        f"{row.algbw / 1e6:.1f}",
        f"{row.busbw / 1e6:.1f}",
        "–" if row.ratio is None else f"{row.ratio:.2f}",
    ]
    if model:
        price = row.predicted_s
        cells += ["–", "–"] if price is None else [
            f"{price * 1e3:.1f}", f"{price / row.seconds - 1:+.0%}"
        ]  # fmt: skip
    return cells
