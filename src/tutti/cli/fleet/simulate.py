"""`tutti fleet simulate`: a trace of jobs on a cluster, policies side by side."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.fleet.jobs_of_models import MixFile, asked_mixes
from tutti.cli.fleet.traffic import PlansOfJobs, Share, Traffic, habits_of, shared_network, that_fit
from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.cli.shared.progress import progress_bar
from tutti.errors import InputError, hint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tutti.fleet.chips import Grounds
    from tutti.fleet.figures import FleetFigures
    from tutti.fleet.policy import Policy
    from tutti.fleet.simulate import Breakdowns, History, Simulation
    from tutti.fleet.traces.trace import Trace

USUAL = ("fifo/random", "fifo/first", "fifo/tightest", "fifo/tightest/wait/move")


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
    traffic: Traffic = "none",
    plan: PlansOfJobs = None,
    share: Share = 0.2,
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
    mixes: MixFile = None,
    html: Annotated[Path | None, typer.Option(help="Write a page: nodes × time by job.")] = None,
    json: Json = False,
) -> None:
    """Run a trace of jobs on a cluster, under several policies."""
    from dataclasses import replace

    from tutti.fleet.chips import Grounds
    from tutti.fleet.figures import figures
    from tutti.fleet.policy import Policy
    from tutti.fleet.simulate import Simulation
    from tutti.fleet.traces.trace import requests_of
    from tutti.hardware.cluster import Cluster

    quotas = _quotas(quota or [])
    policies = [replace(Policy.parse(text), seed=seed, quotas=quotas) for text in policy or USUAL]
    grounds = Grounds.of(Cluster.load(cluster))
    replayed = _trace(trace, grounds, jobs, load, seed).denser(denser)
    _check_tenants(quotas, replayed)
    for name, value in (("--checkpoint", checkpoint), ("--restart", restart)):
        if not value >= 0:
            raise InputError(f"{name}: {value:g} s; give 0 or more")
    table = asked_mixes(replayed, grounds.cluster, mixes, shown=not json)
    requests = requests_of(
        replayed, grounds, checkpoint_s=checkpoint, restart_s=restart, mixes=table
    )
    habits = habits_of(plan or [], [request.job for _, request in requests])
    requests = that_fit(grounds, requests, habits)

    def simulation_of(one: Policy) -> Simulation:
        network = shared_network(grounds, traffic, share, habits, alone=alone)
        breakdowns = _breakdowns(mtbf, seed)
        return Simulation(grounds, one, requests, network=network, breakdowns=breakdowns)

    histories = _histories(policies, simulation_of, shown=not json)
    rows = [figures(history) for history in histories]
    if html is not None:
        from tutti.report.fleet import write_fleet_page

        write_fleet_page(html, histories, rows, replayed)
    if json:
        print_json(_document(replayed, grounds, rows) | {"traffic": traffic})
        return
    _print(replayed, grounds, rows)
    if html is not None:
        typer.echo(f"written to {html}")


def _histories(
    policies: Sequence[Policy], simulation_of: Callable[[Policy], Simulation], *, shown: bool
) -> list[History]:
    """Run the trace under each policy; the bar says how many jobs are done."""
    histories = []
    with progress_bar("count", "simulating", wanted=shown) as update:
        for one in policies:
            say = functools.partial(update, one.name)
            histories.append(simulation_of(one).run(say))
    return histories


def _document(trace: Trace, grounds: Grounds, rows: Sequence[FleetFigures]) -> dict[str, Any]:
    return {
        "trace": trace.name, "kind": trace.kind, "jobs": len(trace.rows),
        "left_out": trace.left_out, "span_s": trace.span_s, "cluster": grounds.cluster.name,
        "nodes": grounds.num_nodes, "chips": grounds.num_chips,
        "policies": [row.to_document() for row in rows],
    }  # fmt: skip


def _trace(name: str, grounds: Grounds, jobs: int, load: float, seed: int) -> Trace:
    from tutti.fleet.traces.generate import generate, moments
    from tutti.fleet.traces.trace import read_trace

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


def _check_tenants(quotas: dict[str, int], trace: Trace) -> None:
    tenants = sorted({row.tenant for row in trace.rows} - {""})
    for name in quotas:
        if name not in tenants:
            known = hint(name, tenants) if tenants else "its jobs name no tenants"
            raise InputError(f"--quota: no job of {trace.name} is of tenant '{name}'; {known}")


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
