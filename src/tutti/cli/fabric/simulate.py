"""`tutti fabric simulate`: the traffic of plans over their fabric, flow by flow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.errors import InputError, hint

if TYPE_CHECKING:
    from tutti.fabric.failures import Failures
    from tutti.fabric.paths import Rules
    from tutti.fabric.wiring import Wiring
    from tutti.hardware.cluster import Cluster
    from tutti.simulate.fabric_step import PlanOnFabric

_ROWS = 12  # of a plan's traffic in the table; --json has all


def simulate(
    plans: Annotated[list[Path], typer.Argument(help="Plan files for one cluster.")],
    routing: Annotated[
        str | None, typer.Option(help="spray, ecmp, polarised, source_port, flowlet or adaptive.")
    ] = None,
    connections: Annotated[int | None, typer.Option(help="Connections per pair of chips.")] = None,
    split: Annotated[
        str, typer.Option(help="static: equal bytes per connection; dynamic: by room.")
    ] = "static",
    fail: Annotated[
        list[str] | None,
        typer.Option(help="What has failed: 'spine 3', 'leaf 2 - spine 7', a chip's NICs a/0/3."),
    ] = None,
    in_switch: Annotated[
        bool | None,
        typer.Option(
            "--in-switch/--no-in-switch",
            help="Switches add up all-reduces between nodes (SHARP) [default: as the fabric says].",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the connections' source ports.")] = 0,
    html: Annotated[Path | None, typer.Option(help="Write a page: links over time.")] = None,
    json: Json = False,
) -> None:
    """Send the traffic of one plan, or of several at once, over their fabric."""
    from tutti.cli.predict import load_estimate
    from tutti.cost.plan.sources import Sources
    from tutti.fabric.failures import Failures
    from tutti.fabric.wiring import wire
    from tutti.files import require_apart
    from tutti.plan.check import embedded_cluster
    from tutti.plan.files import load_plan
    from tutti.simulate.fabric_step import plans_on_fabric
    from tutti.simulate.plan_traffic import plan_traffic

    for path in plans:
        require_apart(path, html)
        if load_plan(path).job.serving is not None:
            raise InputError(f"{path.name}: serves; the fabric is simulated for training steps")
    estimates = [load_estimate(path, Sources()) for path in plans]
    cluster = embedded_cluster(estimates[0].schedule.plan)
    for path, one in zip(plans, estimates, strict=True):
        _require_same(plans[0], cluster, path, embedded_cluster(one.schedule.plan))
    wiring = wire(cluster)
    rules = _rules(wiring, routing, connections, split, seed)
    failures = Failures.parse(wiring, fail) if fail else None
    traffic = [plan_traffic(one, wiring) for one in estimates]
    adding = cluster.fabric.in_switch_reduction if in_switch is None else in_switch
    results = plans_on_fabric(
        _names(plans), estimates, traffic, wiring, rules=rules, failures=failures, in_switch=adding
    )
    said = _said(rules, failures) + (" · switches add up" if adding else "")
    if failures is not None:
        from tutti.simulate.fabric_step import stall
        from tutti.units import seconds_text

        seconds, hit = stall([one for own in traffic for one in own], wiring, rules, failures)
        said += f" ({hit:,} connections stood still for up to {seconds_text(seconds)})"
    if html is not None:
        from tutti.report.fabric import write_fabric_page

        rates = wiring.rates if failures is None else failures.rates(wiring)
        write_fabric_page(html, results, wiring, rates, said)
    if json:
        document = {"cluster": cluster.name, "routing": rules.routing.value,
                    "connections": rules.connections, "in_switch": adding}  # fmt: skip
        print_json(document | {"plans": [_document(result) for result in results]})
        return
    typer.echo(f"{cluster.name}: {said}")
    for result in results:
        _print(result, several=len(results) > 1)
    if html is not None:
        typer.echo(f"written to {html}")


def _names(plans: list[Path]) -> list[str]:
    names = [path.stem for path in plans]
    return [f"{n} ({i})" if names.count(n) > 1 else n for i, n in enumerate(names, 1)]


def _require_same(first: Path, cluster: Cluster, path: Path, other: Cluster) -> None:
    if other.fingerprint() != cluster.fingerprint():
        if other.name == cluster.name:
            raise InputError(
                f"{path.name} and {first.name} are plans for two clusters that are both called "
                f"'{cluster.name}'; plans share a fabric only on one cluster"
            )
        raise InputError(
            f"{path.name} is a plan for cluster '{other.name}', {first.name} for "
            f"'{cluster.name}'; plans share a fabric only on one cluster"
        )


def _rules(
    wiring: Wiring, routing: str | None, connections: int | None, split: str, seed: int
) -> Rules:
    from dataclasses import replace

    from tutti.fabric.paths import Rules
    from tutti.hardware.fabric import Routing

    rules = Rules.of(wiring)
    ways = [known.value for known in Routing]
    if routing is not None and routing not in ways:
        raise InputError(f"--routing '{routing}': {hint(routing, ways)}")
    if connections is not None and connections < 1:
        raise InputError(f"--connections: {connections}; must be at least 1")
    if split not in ("static", "dynamic"):
        raise InputError(f"--split '{split}': {hint(split, ('static', 'dynamic'))}")
    if seed < 0:
        raise InputError(f"--seed: {seed}; must be at least 0")
    return replace(
        rules,
        routing=rules.routing if routing is None else Routing(routing),
        connections=rules.connections if connections is None else connections,
        split="dynamic" if split == "dynamic" else "static",
        seed=seed,
    )


def _said(rules: Rules, failures: Failures | None) -> str:
    gone = f" · without {', '.join(failures.names)}" if failures is not None else ""
    plural = "connection" if rules.connections == 1 else "connections"
    return f"{rules.routing.value}, {rules.connections} {plural} per pair{gone}"


def _document(plan: PlanOnFabric) -> dict[str, Any]:
    return {
        "plan": plan.name,
        "step_seconds_priced": plan.priced_s,
        "step_seconds_alone": plan.alone_s,
        "step_seconds": plan.together_s,
        "traffic": [
            {
                "what": one.traffic.name, "operation": one.traffic.operation.value,
                "program": one.program, "groups": one.traffic.groups,
                "ranks": one.traffic.ranks, "bytes": one.traffic.num_bytes, "flows": one.flows,
                "seconds_priced": one.priced_s, "seconds_alone": one.alone_s,
                "seconds_own_plan": one.shared_s, "seconds": one.together_s,
                "bus_bandwidth_per_chip": one.bus_bandwidth, "slowest_connection": one.slowest_flow,
            }
            for one in plan.sent
        ],
    }  # fmt: skip


def _print(plan: PlanOnFabric, *, several: bool) -> None:
    from rich import box
    from rich.table import Table

    from tutti.units import bytes_text, seconds_text

    change = 100 * (plan.together_s / plan.priced_s - 1)
    beside = f", alone on the fabric {seconds_text(plan.alone_s)}" if several else ""
    typer.echo(
        f"{plan.name}: step {seconds_text(plan.together_s)}, priced "
        f"{seconds_text(plan.priced_s)} ({change:+.1f} %){beside}"
    )
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("what", "program", "groups", "bytes", "priced", "alone", "with all", "busbw",
                 "slowest"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("what", "program") else "right")
    order = sorted(plan.sent, key=lambda one: -one.together_s)
    for one in order[:_ROWS]:
        what = one.traffic.name
        if one.program != "send":
            what = f"{what}: {one.traffic.operation.value}"
        table.add_row(
            what, one.program, f"{one.traffic.groups} × {one.traffic.ranks}",
            bytes_text(one.traffic.num_bytes), seconds_text(one.priced_s),
            seconds_text(one.alone_s), seconds_text(one.together_s),
            f"{one.bus_bandwidth / 1e9:.1f} GB/s" if one.bus_bandwidth else "–",
            f"{one.slowest_flow / 1e9:.2f} GB/s",
        )  # fmt: skip
    print_rich(table)
    if len(order) > _ROWS:
        typer.echo(f"… and {len(order) - _ROWS} more (--json has all)")
