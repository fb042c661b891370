"""`tutti predict`: time, memory and MFU of one plan, with the breakdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from tutti.cost.plan.sources import Sources
    from tutti.cost.storage.prediction import StorageSeconds
    from tutti.simulate.estimate import Estimate

ProfileFolder = Annotated[
    Path | None,
    typer.Option("--profile", help="A folder of per-layer measurements to predict units by."),
]
Extrapolate = Annotated[
    bool, typer.Option("--extrapolate", help="Go beyond what the profile measured, and say so.")
]


ChipProfiles = Annotated[
    list[str] | None,
    typer.Option(
        "--chip-profile",
        help="What `tutti profile` measured of a chip (a file, or one that ships, such as h200): "
        "predict its operators by it. May be repeated.",
        metavar="FILE",
    ),
]
CalibrationFolder = Annotated[
    Path | None,
    typer.Option("--calibrations", help="A folder that `tutti calibrate` wrote, used first."),
]
MeasureMemory = Annotated[
    str | None,
    typer.Option(
        "--measure-memory",
        help="Run every kind of unit once on a device of this machine (cpu, cuda, …) and predict "
        "memory by what its passes took.",
        metavar="DEVICE",
    ),
]


def predict(
    plan: Annotated[Path, typer.Argument(help="A plan file.")],
    calibrations: CalibrationFolder = None,
    profile: ProfileFolder = None,
    extrapolate: Extrapolate = False,
    chip_profile: ChipProfiles = None,
    measure_memory: MeasureMemory = None,
    json: Json = False,
) -> None:
    """Predict the time, memory and MFU of a training step, and whether it fits."""
    if measure_memory is not None and profile is not None:
        raise InputError("--profile has the memory of units, too; leave --measure-memory out")
    sources = load_sources(calibrations, profile, chip_profile, extrapolate=extrapolate)
    if measure_memory is not None:
        sources = _with_measured_memory(sources, plan, measure_memory)
    estimated = load_estimate(plan, sources)
    if json:
        print_json(estimate_document(estimated))
        return
    print_rich(*_tables(estimated))


def load_sources(
    calibrations: Path | None,
    profile: Path | None,
    chip_profiles: Sequence[str] | None,
    *,
    extrapolate: bool,
) -> Sources:
    """Return what prices rest on, by the options that every pricing verb has."""
    from tutti.cost.calibration.shipped import load_calibrations
    from tutti.cost.measured.layer_profiles import LayerProfiles
    from tutti.cost.plan.sources import Sources
    from tutti.hardware.profile import Profile

    if extrapolate and profile is None:
        raise InputError("--extrapolate goes with --profile; prices without one say so anyway")
    if profile is not None and chip_profiles:
        raise InputError("--profile and --chip-profile both price units; give one of them")
    return Sources(
        calibrations=load_calibrations(calibrations) if calibrations is not None else (),
        layer_profiles=LayerProfiles.load(profile) if profile is not None else None,
        profiles=tuple(Profile.find(name) for name in chip_profiles or ()),
        extrapolate=extrapolate,
    )


def _with_measured_memory(sources: Sources, plan: Path, device: str) -> Sources:
    """Return the sources with what passes take on a device of this machine."""
    from dataclasses import replace

    from tutti.accelerator import open_accelerator
    from tutti.plan.check import embedded_model
    from tutti.plan.files import load_plan
    from tutti.train.engine.unit_memory import measure_ranks

    given = load_plan(plan)
    measured = measure_ranks(given, embedded_model(given), open_accelerator(device))
    return replace(sources, measured_ranks=measured)


def load_estimate(plan: Path, sources: Sources) -> Estimate:
    """Estimate the plan of a file."""
    from tutti.plan.files import load_plan
    from tutti.simulate.estimate import estimate

    return estimate(load_plan(plan), sources=sources)


def estimate_document(estimated: Estimate) -> dict[str, object]:
    """Return an estimate as plain values, seconds and bytes."""
    result = estimated.result
    return {
        "step_time_s": estimated.step_seconds,
        "step_time_interval_s": list(estimated.interval),
        "tokens_per_s": estimated.tokens_per_second,
        "mfu": estimated.mfu,
        "hfu": estimated.hfu,
        "parts_s": dict(estimated.parts),
        "bubble_share": max(c.bubble_share for c in result.classes),
        "fits": estimated.fits,
        "memory": [
            {
                "class": m.name,
                "pool": m.pool,
                "total_bytes": m.total,
                "limit_bytes": m.limit,
                "fits": m.fits,
                "parameters_bytes": m.parameters,
                "gradients_bytes": m.gradients,
                "optimizer_bytes": m.optimizer,
                "moving_bytes": m.moving,
                "runtime_bytes": m.runtime,
            }
            for m in estimated.memory
        ],
        "storage": {
            "data_per_step_s": estimated.storage.data_per_step,
            "checkpoint_bytes": estimated.storage.checkpoint_bytes,
            "checkpoint_write_s": estimated.storage.checkpoint_write,
            "checkpoint_read_s": estimated.storage.checkpoint_read,
            **_more_storage(estimated.storage),
        },
        "basis": dict(estimated.priced.basis),
        "extrapolations": list(estimated.priced.extrapolations),
    }


def _tables(estimated: Estimate) -> list[Table | str]:
    from tutti.units import bytes_text, count_text, seconds_text

    plan = estimated.schedule.plan
    tightest = estimated.tightest
    parts: list[Table | str] = [
        f"[bold]{plan.model.name} on {plan.cluster.name}[/]  "
        f"{seconds_text(estimated.step_seconds)} per step ({_interval(estimated)}), "
        f"{count_text(estimated.tokens_per_second)} tokens/s, "
        f"MFU {estimated.mfu:.1%}"
        + (f", HFU {estimated.hfu:.1%}" if estimated.hfu > estimated.mfu * 1.0001 else ""),
        _parts_table(estimated),
        _memory_table(estimated),
    ]
    if estimated.fits:
        parts.append(f"fits: the tightest is {tightest.name} ({tightest.pool}) with "
                     f"{bytes_text(tightest.total)} of {bytes_text(tightest.limit)}")  # fmt: skip
    else:
        parts.append(
            f"[bold red]does not fit:[/] {tightest.name} ({tightest.pool}) needs "
            f"{bytes_text(tightest.total)} of {bytes_text(tightest.limit)}"
        )
    parts += storage_lines(estimated.storage)
    basis = "; ".join(f"{pool}: {said}" for pool, said in estimated.priced.basis.items())
    parts.append(f"[dim]predicted from {basis}[/]")
    if estimated.priced.extrapolations:
        outside = "; ".join(estimated.priced.extrapolations)
        parts.append(f"[yellow]extrapolated beyond what was measured:[/] {outside}")
    return parts


def _more_storage(storage: StorageSeconds) -> dict[str, object]:
    restore, saving = storage.restore, storage.saving
    return {
        "stall_s": storage.stall,
        "tiers": [
            {"tier": t.tier.value, "seconds": t.seconds, "done_s": t.done_s, "fits": t.fits}
            for t in storage.tiers
        ],
        "restore_each_s": None if restore is None else restore.each_s,
        "restore_broadcast_s": None if restore is None else restore.broadcast_s,
        "start_s": storage.start,
        "stretched_step_s": storage.stretched_step,
        "mean_time_between_failures_s": storage.mean_time_between_failures,
        "save_every_s": None if saving is None else saving.interval_s,
        "hours_lost_per_day": None if saving is None else saving.hours_lost_per_day,
        "warnings": list(storage.warnings),
    }


def storage_lines(storage: StorageSeconds) -> list[str]:
    """Say what a plan's files take, a line each."""
    from tutti.units import bytes_text, seconds_text

    lines = []
    write, restore, saving = storage.checkpoint_write, storage.restore, storage.saving
    if storage.tiers:
        ways = ", ".join(f"{t.tier.words} after {seconds_text(t.done_s)}" for t in storage.tiers)
        lines.append(f"a checkpoint is {bytes_text(storage.checkpoint_bytes)}: {ways}; training "
                     f"stands still for {seconds_text(storage.stall or 0.0)}")  # fmt: skip
    if write is not None and restore is not None:
        way = "one rank reads for all" if restore.broadcast_is_cheaper else "every rank reads"
        lines.append(
            f"a restore takes {seconds_text(restore.seconds)} ({way}; the other way "
            f"{seconds_text(max(restore.each_s, restore.broadcast_s))}), a start "
            f"{seconds_text(storage.start or 0.0)}"
        )
    if saving is not None and storage.mean_time_between_failures is not None:
        lines.append(
            f"a failure every {seconds_text(storage.mean_time_between_failures)}: save every "
            f"{seconds_text(saving.interval_s)}, {saving.hours_lost_per_day:.2f} hours of a day "
            "are lost"
        )
    if storage.stretched_step is not None:
        lines.append(
            f"while a checkpoint is written, over the NICs of training, a step takes "
            f"{seconds_text(storage.stretched_step)}"
        )
    return [*lines, *(f"[yellow]{line}[/]" for line in storage.warnings)]


def _interval(estimated: Estimate) -> str:
    from tutti.units import seconds_text

    low, high = estimated.interval
    return f"8 of 10 times {seconds_text(low)} to {seconds_text(high)}"


def _parts_table(estimated: Estimate) -> Table:
    from rich import box
    from rich.table import Table

    from tutti.units import seconds_text

    table = Table(box=box.SIMPLE, header_style="bold", pad_edge=False)
    table.add_column("where the busiest chips spend the step")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    for name, seconds in sorted(estimated.parts.items(), key=lambda item: -item[1]):
        table.add_row(name, seconds_text(seconds), f"{seconds / estimated.step_seconds:.1%}")
    return table


def _memory_table(estimated: Estimate) -> Table:
    from rich import box
    from rich.table import Table

    from tutti.units import bytes_text, many

    table = Table(box=box.SIMPLE, header_style="bold", pad_edge=False)
    for name in ("memory per chip", "pool"):
        table.add_column(name)
    for name in (
        "parameters",
        "gradients",
        "optimizer",
        "activations, buffers",
        "runtime",
        "sum",
        "of",
    ):
        table.add_column(name, justify="right")
    shown = (
        estimated.memory
        if len(estimated.memory) <= 16
        else (*estimated.memory[:8], *estimated.memory[-8:])
    )
    for m in shown:
        sizes = (m.parameters, m.gradients, m.optimizer, m.moving, m.runtime, m.total, m.limit)
        style = None if m.fits else "red"
        table.add_row(m.name, m.pool, *(bytes_text(size) for size in sizes), style=style)
    if hidden := len(estimated.memory) - len(shown):
        table.caption = f"{many(hidden, 'more class', 'more classes')} between (--json)"
    return table
