"""`tutti fleet simulate`: a trace of jobs on a cluster, policies side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.cli.shared.progress import progress_bar
from tutti.errors import InputError, hint

if TYPE_CHECKING:
    from tutti.fleet.chips import Grounds
    from tutti.fleet.figures import FleetFigures
    from tutti.fleet.network import SharedNetwork
    from tutti.fleet.request import JobRequest, Shape
    from tutti.fleet.simulate import Breakdowns
    from tutti.fleet.trace import Trace
    from tutti.simulate.step_traffic import StepTraffic

USUAL = ("fifo/random", "fifo/first", "fifo/tightest", "fifo/tightest/wait/move")
_PATTERNS = ("none", "ring", "all_to_all")


def simulate(
    trace: Annotated[
        str,
        typer.Argument(
            help="A trace (CSV, sacct), or one to generate: seren, kalos, philly, helios."
        ),
    ],
    cluster: Annotated[str, typer.Argument(help="A cluster file, or the name of an example.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Such as fifo/tightest/wait/move; may be repeated.", metavar="POLICY"),
    ] = None,
    denser: Annotated[float, typer.Option(help="Arrivals so many times as close.")] = 1.0,
    jobs: Annotated[int, typer.Option(help="Of a generated trace.")] = 10_000,
    load: Annotated[float, typer.Option(help="Of a generated trace, of all chips.")] = 0.9,
    seed: Annotated[int, typer.Option(help="Of what is left to chance.")] = 0,
    traffic: Annotated[
        str, typer.Option(help="What jobs send: none, ring or all_to_all.")
    ] = "none",
    plan: Annotated[
        list[str] | None,
        typer.Option(help="Jobs that are a plan: NAME=PLAN, a pattern such as 'gpt*=gpt.json'."),
    ] = None,
    share: Annotated[float, typer.Option(help="Of a step in which they send.")] = 0.2,
    alone: Annotated[
        bool, typer.Option("--alone", help="With --traffic: jobs do not disturb each other.")
    ] = False,
    checkpoint: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 1800.0,
    restart: Annotated[float, typer.Option(help="Seconds to save, start and load.")] = 300.0,
    quota: Annotated[
        list[str] | None, typer.Option(help="Chips at once of a tenant: NAME=64.", metavar="QUOTA")
    ] = None,
    mtbf: Annotated[
        float | None, typer.Option(help="Hours between failures of one node.", metavar="HOURS")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page: nodes × time by job.")] = None,
    json: Json = False,
) -> None:
    """Run a trace of jobs on a cluster, under several policies."""
    from dataclasses import replace

    from tutti.fleet.chips import Grounds
    from tutti.fleet.figures import figures
    from tutti.fleet.policy import Policy
    from tutti.fleet.simulate import Simulation
    from tutti.fleet.trace import requests_of
    from tutti.hardware.cluster import Cluster

    quotas = _quotas(quota or [])
    policies = [replace(Policy.parse(text), seed=seed, quotas=quotas) for text in policy or USUAL]
    grounds = Grounds.of(Cluster.load(cluster))
    replayed = _trace(trace, grounds, jobs, load, seed).denser(denser)
    for name, value in (("--checkpoint", checkpoint), ("--restart", restart)):
        if not value >= 0:
            raise InputError(f"{name}: {value:g} s; give 0 or more")
    requests = requests_of(replayed, grounds, checkpoint_s=checkpoint, restart_s=restart)
    habits = _habits(plan or [], [request.job for _, request in requests])
    requests = _that_fit(grounds, requests, habits)
    histories, rows = [], []
    with progress_bar("count", "simulating", wanted=not json) as update:
        for one in policies:
            network = _network(grounds, traffic, share, habits, alone=alone)
            simulation = Simulation(
                grounds, one, requests, network=network, breakdowns=_breakdowns(mtbf, seed)
            )
            history = simulation.run(lambda done, of, one=one: update(one.name, done, of))  # type: ignore[misc]
            histories.append(history)
            rows.append(figures(history))
    if html is not None:
        from tutti.report.fleet import write_fleet_page

        write_fleet_page(html, histories, rows, replayed)
    if json:
        print_json({
            "trace": replayed.name, "kind": replayed.kind, "jobs": len(replayed.rows),
            "left_out": replayed.left_out, "span_s": replayed.span_s,
            "cluster": grounds.cluster.name,
            "nodes": grounds.num_nodes, "chips": grounds.num_chips, "traffic": traffic,
            "policies": [row.to_document() for row in rows],
        })  # fmt: skip
        return
    _print(replayed, grounds, rows)
    if html is not None:
        typer.echo(f"written to {html}")


def _trace(name: str, grounds: Grounds, jobs: int, load: float, seed: int) -> Trace:
    from tutti.fleet.generate import generate, moments
    from tutti.fleet.trace import read_trace

    path = Path(name)
    if path.exists() or path.suffix or name not in moments():
        if not path.exists() and not path.suffix and "/" not in name:
            raise InputError(f"no trace '{name}'; {hint(name, moments())}, or name a file")
        return read_trace(path)
    largest = max(pool.num_chips for pool in grounds.cluster.pools)
    return generate(name, jobs, chips=grounds.num_chips, load=load, seed=seed, largest=largest)


def _quotas(texts: list[str]) -> dict[str, int]:
    quotas = {}
    for text in texts:
        tenant, _, chips = text.partition("=")
        if not tenant or not chips.isdecimal():
            raise InputError(f"--quota: '{text}'; write a tenant and its chips, such as vision=64")
        quotas[tenant] = int(chips)
    return quotas


def _habits(texts: list[str], jobs: list[str]) -> dict[str, StepTraffic]:
    """Return what jobs send that are plans."""
    from fnmatch import fnmatchcase

    from tutti.cli.predict import load_estimate
    from tutti.cost.plan.sources import Sources
    from tutti.simulate.step_traffic import step_traffic

    habits: dict[str, StepTraffic] = {}
    for text in texts:
        pattern, _, file = text.partition("=")
        if not pattern or not file:
            raise InputError(f"--plan: '{text}'; write jobs and their plan, such as gpt=gpt.json")
        chosen = [job for job in jobs if fnmatchcase(job, pattern)]
        if not chosen:
            raise InputError(f"--plan: no job is called '{pattern}'; {hint(pattern, jobs)}")
        steps = step_traffic(Path(file).stem, load_estimate(Path(file), Sources()))
        habits |= dict.fromkeys(chosen, steps)
    return habits


def _that_fit(
    grounds: Grounds, requests: list[tuple[float, JobRequest]], habits: dict[str, StepTraffic]
) -> list[tuple[float, JobRequest]]:
    """Leave each job that is a plan the shapes that the plan can run on; InputError: it has none.

    Jobs that ask for the same keep the same shapes: what the scheduler knows of a shape it knows
    of all of them.
    """
    from dataclasses import replace

    from tutti.fleet.network import fitting_shapes

    known: dict[tuple[int, tuple[Shape, ...]], tuple[Shape, ...]] = {}
    fitting = []
    for time, request in requests:
        steps = habits.get(request.job)
        if steps is not None:
            key = (id(steps), request.shapes)
            if key not in known:
                try:
                    known[key] = fitting_shapes(grounds, steps, request.shapes)
                except InputError as error:
                    raise InputError(f"--plan: job '{request.job}': {error}") from None
            request = replace(request, shapes=known[key])
        fitting.append((time, request))
    return fitting


def _network(
    grounds: Grounds, traffic: str, share: float, habits: dict[str, StepTraffic], *, alone: bool
) -> SharedNetwork | None:
    from tutti.fleet.network import Habit, Pattern, SharedNetwork

    if traffic not in _PATTERNS:
        raise InputError(f"--traffic: '{traffic}'; {hint(traffic, _PATTERNS)}")
    if traffic == "none":
        silent = Habit(share=0.0)
        return SharedNetwork(grounds, habits, silent, together=not alone) if habits else None
    try:
        habit = Habit(share=share, pattern=Pattern(traffic))
    except InputError as error:
        raise InputError(f"--share: {error}") from None
    return SharedNetwork(grounds, habits, usual=habit, together=not alone)


def _breakdowns(hours: float | None, seed: int) -> Breakdowns | None:
    from tutti.fleet.simulate import Breakdowns

    if hours is None:
        return None
    if not hours > 0:
        raise InputError(f"--mtbf: {hours:g} hours; give more than 0")
    return Breakdowns(node_mtbf_s=hours * 3600.0, seed=seed)


def _print(trace: Trace, grounds: Grounds, rows: list[FleetFigures]) -> None:
    from rich import box
    from rich.table import Table

    from tutti.units import seconds_text

    left = f", {trace.left_out:,} rows left out" if trace.left_out else ""
    typer.echo(
        f"{trace.name} ({trace.kind}): {len(trace.rows):,} jobs over {seconds_text(trace.span_s)}"
        f"{left}, on {grounds.cluster.name}: {grounds.num_nodes:,} nodes, "
        f"{grounds.num_chips:,} chips"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy", no_wrap=True, min_width=max(len(row.policy) for row in rows))
    for name in ("wait mean", "p95", "done mean", "p95", "in use", "frag.", "spread",
                 "groups", "network", "moves", "stops"):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.policy, seconds_text(row.wait_mean_s), seconds_text(row.wait_p95_s),
            seconds_text(row.completion_mean_s), seconds_text(row.completion_p95_s),
            f"{row.utilisation:.1%}", f"{row.fragmentation:.1%}", f"{row.spread_jobs:.1%}",
            f"{row.groups_over_fewest:.2f}×", f"{row.network_share:.2%}", f"{row.moves:,}",
            f"{row.preemptions + row.lost:,}",
        )  # fmt: skip
    print_rich(table)
    typer.echo(
        "spread: multi-node jobs in more groups than they need; groups: per job, over the fewest "
        "possible; network: of running time, lost to it"
    )
