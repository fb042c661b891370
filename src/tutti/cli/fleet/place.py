"""`tutti fleet place`: what to start where now, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.fleet.jobs_of_models import MixFile, asked_mixes
from tutti.cli.fleet.traffic import PlansOfJobs, Share, Traffic, habits_of, shared_network, that_fit
from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.errors import InputError

if TYPE_CHECKING:
    from tutti.fleet.chips import Grounds
    from tutti.fleet.placing import Placed


def place(
    jobs: Annotated[Path, typer.Argument(help="Jobs that wait: a trace (CSV, sacct).")],
    cluster: Annotated[str, typer.Argument(help="A cluster file, or the name of an example.")],
    policy: Annotated[
        str, typer.Option(help="Such as fifo/tightest/wait.", metavar="POLICY")
    ] = "fifo/tightest",
    busy: Annotated[
        list[str] | None,
        typer.Option(help="Nodes that are taken, such as 'a800/0-3,7'.", metavar="NODES"),
    ] = None,
    until: Annotated[
        float | None, typer.Option(help="Seconds until those are expected back; else unknown.")
    ] = None,
    down: Annotated[
        list[str] | None, typer.Option(help="Nodes that are gone.", metavar="NODES")
    ] = None,
    traffic: Traffic = "none",
    plan: PlansOfJobs = None,
    share: Share = 0.2,
    mixes: MixFile = None,
    json: Json = False,
) -> None:
    """Say which of some jobs to start now, on which nodes, and why the others wait.

    With --traffic or --plan also which of them should begin later, so that they send by turns.
    """
    from tutti.fleet.chips import Grounds
    from tutti.fleet.placing import place_now
    from tutti.fleet.policy import Policy
    from tutti.fleet.traces.trace import read_trace, requests_of
    from tutti.hardware.cluster import Cluster

    rule = Policy.parse(policy)
    grounds = Grounds.of(Cluster.load(cluster))
    waiting = read_trace(jobs)
    table = asked_mixes(waiting, grounds.cluster, mixes, shown=not json)
    timed = requests_of(waiting, grounds, mixes=table)
    habits = habits_of(plan or [], [request.job for _, request in timed])
    requests = [request for _, request in that_fit(grounds, timed, habits)]
    network = shared_network(grounds, traffic, share, habits)
    if until is not None and not until > 0:
        raise InputError(f"--until: {until:g} s; give more than 0")
    placed = place_now(
        grounds, rule, requests, busy=node_numbers(grounds, "--busy", busy),
        busy_s=until, down=node_numbers(grounds, "--down", down), network=network,
    )  # fmt: skip
    starts = {one.job: one.allocation.mask for one in placed if one.allocation is not None}
    turns = [] if network is None else network.turns(starts)
    if json:
        print_json({
            "policy": rule.name, "jobs": [_document(grounds, one) for one in placed],
            "turns": [{"later_s": later, "saves": saves} for later, saves in turns],
        })  # fmt: skip
        return
    _print(grounds, placed)
    for later, saves in turns:
        when = ", ".join(f"{job} {_later(seconds)}" for job, seconds in later.items())
        typer.echo(f"on links they share they send by turns: {when}; steps {saves:.1%} shorter")


def _later(seconds: float) -> str:
    from tutti.units import seconds_text

    return f"begins {seconds_text(seconds)} later" if seconds > 0 else "begins"


def node_numbers(grounds: Grounds, option: str, texts: list[str] | None) -> list[int]:
    """Return nodes by number over all pools, as an option names them."""
    from tutti.hardware.node_list import check_chosen, parse_nodes

    if not texts:
        return []
    numbers_of_nodes = []
    try:
        for name, numbers in parse_nodes(texts).items():
            check_chosen(grounds.cluster.pool(name), numbers)
            first = grounds.first[grounds.pool_names.index(name)]
            numbers_of_nodes += [first + number for number in numbers]
    except InputError as error:
        raise InputError(f"{option}: {error}") from None
    return numbers_of_nodes


def _document(grounds: Grounds, one: Placed) -> dict[str, Any]:
    from tutti.hardware.node_list import nodes_text

    start = one.allocation
    return {
        "job": one.job,
        "starts": start is not None,
        "nodes": None if start is None else nodes_text(grounds.node_numbers(start.nodes)),
        "groups": one.groups,
        "fewest_groups": one.fewest,
        "promised_s": one.promised_s,
        "why": one.why,
    }


def _print(grounds: Grounds, placed: list[Placed]) -> None:
    from rich import box
    from rich.table import Table

    from tutti.hardware.node_list import nodes_text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("job", "on", "groups", "why"):
        table.add_column(name, justify="right" if name == "groups" else "left", overflow="fold")
    for one in placed:
        start = one.allocation
        on = "waits" if start is None else nodes_text(grounds.node_numbers(start.nodes))
        table.add_row(one.job, on, "–" if start is None else str(one.groups), one.why)
    print_rich(table)
    starts = sum(one.allocation is not None for one in placed)
    typer.echo(f"{starts} of {len(placed)} start now")
