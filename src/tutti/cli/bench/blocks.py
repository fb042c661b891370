"""`tutti bench blocks`: forward and backward of whole blocks beside what a profile predicts."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.cli.shared.progress import ProgressLine
from tutti.cli.shared.torch_needed import require_torch
from tutti.errors import InputError
from tutti.units import many

if TYPE_CHECKING:
    from rich.table import Table

    from tutti.accelerator import Accelerator
    from tutti.bench.block_runs import BlockRun, BlockShape
    from tutti.cost.measured.chip import MeasuredChip
    from tutti.hardware.chip import Dtype
    from tutti.hardware.profile import Profile


Models = Annotated[
    list[str] | None,
    typer.Argument(help="Llama-like models whose first block to time.", metavar="[MODELS]"),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, … (default: the best here).")]
ProfileOption = Annotated[
    str | None, typer.Option(help="A profile of this chip to predict from.", metavar="FILE")
]
DtypeOption = Annotated[
    str | None, typer.Option(help="fp32, bf16, fp16 or fp8 (default: bf16; fp32 on a cpu).")
]
Compiled = Annotated[bool, typer.Option("--compiled", help="Also our block under torch.compile.")]
Peers = Annotated[bool, typer.Option("--peers/--no-peers", help="Also the block of transformers.")]
HoldOut = Annotated[
    bool,
    typer.Option(
        "--hold-out/--as-measured",
        help="Predict without the profile's measurements on the very shapes of the block.",
    ),
]


def blocks(
    models: Models = None,
    device: Device = None,
    profile: ProfileOption = None,
    dtype: DtypeOption = None,
    sequences: Annotated[int, typer.Option(help="Sequences of a micro-batch.", min=1)] = 2,
    sequence_length: Annotated[int, typer.Option(help="Tokens of a sequence.", min=1)] = 4096,
    rounds: Annotated[int, typer.Option(help="Samples of each block, in turns.", min=1)] = 11,
    compiled: Compiled = False,
    peers: Peers = True,
    hold_out: HoldOut = True,
    json: Json = False,
) -> None:
    """Time blocks forward and backward, and compare with the prediction from a profile."""
    require_torch("bench blocks")
    from tutti.accelerator import open_accelerator
    from tutti.bench.block_runs import DEVICE_MODELS, host_shapes, model_shapes
    from tutti.cli.profile import chosen_dtype
    from tutti.hardware.chip import Dtype

    opened = open_accelerator(device)
    chosen = Dtype.FP8 if dtype == Dtype.FP8 else chosen_dtype(dtype, opened)
    known = _profile(profile, opened)
    if models:
        shapes = model_shapes(models, sequences, sequence_length)
    elif opened.device.type == "cpu":
        shapes = host_shapes()
    else:
        shapes = model_shapes(DEVICE_MODELS, sequences, sequence_length)
    rows = []
    with ProgressLine("timing blocks", wanted=not json) as line:
        for shape in shapes:
            line.say(shape.name)
            runs, pace = _time(shape, opened, chosen, rounds, known, compiled=compiled, peers=peers)
            rows += _rows(shape, runs, known, chosen, pace, hold_out=hold_out)
    summary = _summary(rows)
    if json:
        print_json({"chip": opened.chip, "dtype": chosen.value, "rows": rows, **summary})
        return
    print_rich(_table(rows, f"{opened.chip}, {chosen.value}, medians of {rounds}"))
    if summary:
        typer.echo(
            f"prediction error: mean {summary['mean_error']:.1%}, largest "
            f"{summary['largest_error']:.1%}, of {many(summary['predicted'], 'block')}"
            + (", none of whose shapes were used" if hold_out else "")
        )
        typer.echo(
            f"at today's pace (products of the profile timed again beside the blocks): mean "
            f"{summary['mean_error_at_pace']:.1%}, largest {summary['largest_error_at_pace']:.1%}"
        )


def _profile(name: str | None, opened: Accelerator) -> Profile | None:
    from tutti.hardware.profile import Profile

    if name is None:
        return None
    from tutti.bench.block_issue import IN_A_STEP
    from tutti.cost.measured.rescale import PassFactors, reissued

    # here the host issues blocks in a loop, not in the midst of a step
    alone = PassFactors(forward=1.0 / IN_A_STEP, backward=1.0 / IN_A_STEP)
    profile = reissued(Profile.find(name), alone)
    if profile.chip != opened.chip:
        raise InputError(
            f"--profile {name}: is of '{profile.chip}', but this is '{opened.chip}'; measure it "
            "with tutti profile"
        )
    return profile


def _time(
    shape: BlockShape,
    opened: Accelerator,
    dtype: Dtype,
    rounds: int,
    profile: Profile | None,
    *,
    compiled: bool,
    peers: bool,
) -> tuple[list[BlockRun], float]:
    """Return the timed runs, and how much slower the machine is now than when it was profiled."""
    from tutti.accelerator.profiling.timer import timer_for
    from tutti.bench.block_runs import (
        anchors_of,
        drift,
        hugging_face_run,
        our_run,
        summed_run,
        time_runs,
    )

    runs = [our_run(shape, opened, dtype)]
    if profile is not None:
        runs.append(summed_run(shape, opened, dtype))
    if compiled:
        runs.append(our_run(shape, opened, dtype, compiled=True))
    if peers and importlib.util.find_spec("transformers") is not None:
        other = hugging_face_run(shape, opened, dtype)
        runs += [other] if other is not None else []
    timer = timer_for(opened)
    anchors = [] if profile is None else anchors_of(profile, opened, dtype, timer)
    time_runs(runs, timer, rounds, anchors)
    opened.empty_cache()
    return runs, drift(anchors) if anchors else 1.0


def _rows(
    shape: BlockShape,
    runs: list[BlockRun],
    profile: Profile | None,
    dtype: Dtype,
    pace: float,
    *,
    hold_out: bool,
) -> list[dict[str, Any]]:
    from tutti.bench.block_runs import SUMMED
    from tutti.cost.measured.chip import MeasuredChip

    chip = None if profile is None else MeasuredChip(profile, dtype)
    rows = []
    for run in runs:
        row: dict[str, Any] = {
            "block": shape.name,
            "sequences": shape.sequences,
            "length": shape.length,
            "who": run.who,
            "forward_s": run.forward_s,
            "backward_s": run.backward_s,
            "step_s": run.step_s,
            "spread": run.step_samples.spread,
            "flops_per_s": shape.flops / run.step_s,
        }
        if run.step_samples.issue_s < float("inf"):
            row["issue_s"] = run.step_samples.issue_s
        if chip is not None:
            row["share_of_ceiling"] = row["flops_per_s"] / chip.matrix_ceiling
        if run.who == "transformers":
            row["tutti_speedup"] = run.step_s / min(r.step_s for r in runs if r is not run)
        if chip is not None and run.who == SUMMED:
            row |= _predicted(shape, run, chip, hold_out=hold_out)
            row |= {"drift": pace, "error_at_pace": pace * row["predicted_s"] / run.step_s - 1.0}
        rows.append(row)
    return rows


def _predicted(
    shape: BlockShape, run: BlockRun, chip: MeasuredChip, *, hold_out: bool
) -> dict[str, Any]:
    from tutti.cost.measured.unit import predict_block, unit_shapes
    from tutti.models.operators import Workload

    work = Workload(sequences=shape.sequences, sequence_length=shape.length)
    used = unit_shapes(shape.spec, 1, work)
    measured = {(row.operator, row.shape) for row in chip.profile.operators}
    if hold_out:
        chip = chip.without(used)
    seconds = predict_block(chip, shape.spec, work)
    return {
        "predicted_forward_s": seconds.forward,
        "predicted_backward_s": seconds.backward,
        "predicted_s": seconds.total,
        "error": seconds.total / run.step_s - 1.0,
        "parts_s": seconds.parts,
        "outside": list(seconds.outside),
        "shapes_measured": len(used & measured),
        "shapes": len(used),
    }


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    errors = [abs(row["error"]) for row in rows if "error" in row]
    if not errors:
        return {}
    paced = [abs(row["error_at_pace"]) for row in rows if "error_at_pace" in row]
    return {
        "mean_error_at_pace": sum(paced) / len(paced),
        "largest_error_at_pace": max(paced),
        "mean_error": sum(errors) / len(errors),
        "largest_error": max(errors),
        "predicted": len(errors),
    }


def _table(rows: list[dict[str, Any]], title: str) -> Table:
    from rich import box
    from rich.table import Table

    from tutti.units import flops_text, seconds_text

    table = Table(box=box.SIMPLE, header_style="bold", pad_edge=False, title=title)
    for name in ("block", "batch", "who"):
        table.add_column(name)
    for name in (
        "forward",
        "backward",
        "both",
        "±",
        "rate",
        "of ceiling",
        "predicted",
        "error",
        "pace",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        share, error = row.get("share_of_ceiling"), row.get("error")
        predicted = row.get("predicted_s")
        table.add_row(
            row["block"],
            f"{row['sequences']}×{row['length']}",
            row["who"],
            seconds_text(row["forward_s"]),
            seconds_text(row["backward_s"]),
            seconds_text(row["step_s"]),
            f"{row['spread']:.1%}",
            flops_text(row["flops_per_s"]),
            "–" if share is None else f"{share:.1%}",
            "–" if predicted is None else seconds_text(predicted),
            "–" if error is None else f"{error:+.1%}",
            f"{row['drift']:.3f}" if "drift" in row else "–",
        )
    return table
