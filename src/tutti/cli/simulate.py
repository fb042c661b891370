"""`tutti simulate`: the timeline of a step, as table, page or trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tutti.cli.plan.simulated_serving import Wanted, simulate_deployment
from tutti.cli.predict import (
    CalibrationFolder,
    ChipProfiles,
    Extrapolate,
    ProfileFolder,
    load_estimate,
    load_sources,
)
from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.errors import InputError

if TYPE_CHECKING:
    from tutti.cost.plan.sources import Sources
    from tutti.simulate.estimate import Estimate
    from tutti.simulate.perturb import Spread
    from tutti.simulate.result import SimulationResult


def simulate(
    plan: Annotated[Path, typer.Argument(help="A plan file.")],
    html: Annotated[
        Path | None, typer.Option(help="Write a self-contained page with Gantt and memory.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace for Perfetto or chrome://tracing.")
    ] = None,
    over: Annotated[
        Path | None,
        typer.Option(help="A real step to compare with: the trace-step-N.json of a run."),
    ] = None,
    jitter: Annotated[
        float, typer.Option(help="Relative spread of every duration; simulates 20 steps.")
    ] = 0.0,
    slow: Annotated[
        list[str] | None,
        typer.Option(help="Slow a pool or a class of ranks: a800=1.2. May be repeated."),
    ] = None,
    workload: Annotated[
        Path | None,
        typer.Option(help="Of a plan that serves: requests to replay instead of its own."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="Of a plan that serves: how many come (1,000).")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Of a plan that serves: requests per second.")
    ] = None,
    every_engine: Annotated[
        bool, typer.Option("--every-engine", help="Simulate each of equal engines.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the jitter, or of the requests.")] = 0,
    calibrations: CalibrationFolder = None,
    profile: ProfileFolder = None,
    extrapolate: Extrapolate = False,
    chip_profile: ChipProfiles = None,
    json: Json = False,
) -> None:
    """Simulate one step of a plan, instruction by instruction; of one that serves, its requests."""
    from tutti.files import require_apart
    from tutti.plan.files import load_plan

    if jitter > 1:
        raise InputError(
            f"--jitter: {jitter:g} is more than 1; give a relative spread such as 0.02"
        )
    if over is not None and (jitter or slow):
        raise InputError("--over: compares with the plan as it is; drop --jitter and --slow")
    require_apart(plan, html, trace, over, workload)
    sources = load_sources(calibrations, profile, chip_profile, extrapolate=extrapolate)
    read = load_plan(plan)
    if read.job.serving is not None:
        if over is not None or jitter or slow:
            raise InputError(
                f"{plan.name}: serves; --over, --jitter and --slow are for training steps"
            )
        simulate_deployment(
            read,
            Wanted(
                workload=workload, requests=requests, rate=rate, seed=seed,
                every_engine=every_engine, html=html, trace=trace, json=json,
            ),
            sources,
        )  # fmt: skip
        return
    if workload is not None or requests is not None or rate is not None or every_engine:
        raise InputError(
            f"{plan.name}: is for training; --workload, --requests, --rate and --every-engine "
            "are for plans that serve"
        )
    _simulate_step(plan, sources, over, jitter, slow, seed, html=html, trace=trace, json=json)


def _simulate_step(
    plan: Path,
    sources: Sources,
    over: Path | None,
    jitter: float,
    slow: list[str] | None,
    seed: int,
    *,
    html: Path | None,
    trace: Path | None,
    json: bool,
) -> None:
    """Simulate a training step and show it."""
    from tutti.simulate import perturb, repeat
    from tutti.simulate.run import simulate as run

    estimate = load_estimate(plan, sources)
    if over is not None:
        _compare(estimate.result, over, html=html, trace=trace, json=json)
        return
    result = estimate.result
    factors: dict[str | int, float] = dict(_factor(text) for text in slow or ())
    if factors:
        result = run(
            estimate.schedule, perturb(estimate.schedule, estimate.priced.costs, slow=factors)
        )
    spread = None
    if jitter:
        spread = repeat(
            estimate.schedule, estimate.priced.costs, seed=seed, sigma=jitter, slow=factors
        )
    _show(estimate, result, spread, html=html, trace=trace, json=json)


def _show(
    estimate: Estimate,
    result: SimulationResult,
    spread: Spread | None,
    *,
    html: Path | None,
    trace: Path | None,
    json: bool,
) -> None:
    """Write the files that were asked for, and print the rest."""
    from tutti.plan.check import embedded_cluster
    from tutti.report.simulation import write_simulation_page
    from tutti.report.tiles import Tile
    from tutti.simulate.estimate import class_memory, labels_with_peaks
    from tutti.simulate.table import result_table
    from tutti.simulate.trace import write_trace
    from tutti.units import count_text

    # The peaks are those of `tutti predict` and `tutti plan`, allocator slack included.
    memory = estimate.memory
    if result is not estimate.result:
        cluster = embedded_cluster(estimate.schedule.plan)
        memory = class_memory(estimate.schedule, estimate.priced, result, cluster)
    labels = labels_with_peaks(estimate.schedule, memory)
    # Slowed chips slow the whole prediction by as much.
    slower = result.step_seconds / estimate.result.step_seconds
    speed, slowdown = estimate.tokens_per_second / slower, estimate.priced.slowdown
    if html is not None:
        facts = [
            Tile("MFU", f"{100 * estimate.mfu / slower:.1f} %", "of all chips' dense peak"),
            Tile("Throughput", count_text(speed), "tokens per second"),
            Tile("10–90 % interval", _interval_text(estimate, slower), "8 of 10 measured steps"),
        ]
        write_simulation_page(
            html, result, labels, memory=memory, facts=facts, spread=spread, slowdown=slowdown
        )
    if trace is not None:
        write_trace(trace, result)
    if json:
        from tutti.simulate.result_document import result_document

        document = result_document(result, labels)
        document["step_seconds_slowest_node"] = result.step_seconds * slowdown
        document["step_seconds_interval"] = [slower * end for end in estimate.interval]
        print_json(document | ({"jitter": spread.to_document()} if spread is not None else {}))
        return
    print_rich(result_table(result, labels, spread=spread, slowdown=slowdown))
    typer.echo(
        f"{count_text(speed)} tokens/s; 8 of 10 measured steps: {_interval_text(estimate, slower)}"
    )
    for path in filter(None, (html, trace)):
        typer.echo(f"written to {path}")


def _interval_text(estimate: Estimate, slower: float) -> str:
    from tutti.units import seconds_text

    low, high = estimate.interval
    return f"{seconds_text(slower * low)} to {seconds_text(slower * high)}"


def _compare(
    result: SimulationResult, over: Path, *, html: Path | None, trace: Path | None, json: bool
) -> None:
    """Lay a real step over the simulated one."""
    from tutti.cli.shared.compared import kinds_document, kinds_table
    from tutti.report.overlay import write_overlay_page
    from tutti.simulate.measured import read_measured
    from tutti.simulate.trace import write_trace

    step = read_measured(over, result.program)
    if html is not None:
        write_overlay_page(html, result, step)
    if trace is not None:
        write_trace(trace, result)
    if json:
        print_json(kinds_document(result, step))
        return
    print_rich(kinds_table(result, step))
    for path in filter(None, (html, trace)):
        typer.echo(f"written to {path}")


def _factor(text: str) -> tuple[str, float]:
    name, equals, value = text.rpartition("=")
    try:
        factor = float(value)
    except ValueError:
        factor = 0.0
    if not equals or not 0 < factor < float("inf"):
        raise InputError(f"--slow: '{text}': write it like a800=1.2")
    return name, factor
