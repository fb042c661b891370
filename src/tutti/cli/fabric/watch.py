"""`tutti fabric watch`: pauses, marks and discards of ports: who holds whom up."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.shared.output import Json, print_json
from tutti.errors import InputError

if TYPE_CHECKING:
    from tutti.fabric.port_counters import PortChange


def watch(
    links: Annotated[
        Path | None, typer.Argument(help="File that says where each port of a switch leads.")
    ] = None,
    readings: Annotated[
        list[Path] | None, typer.Argument(help="Files of gNMI updates in JSON.")
    ] = None,
    here: Annotated[
        float | None,
        typer.Option(help="Watch the NICs of this host for so long instead.", metavar="SECONDS"),
    ] = None,
    json: Json = False,
) -> None:
    """Find storms, congestion, circular waits, and their origin. Exit codes: 0 none, 1 found."""
    if here is not None:
        if links is not None:
            raise InputError("--here: watches this host; name no files")
        if here <= 0:
            raise InputError(f"--here: {here:g}; must be more than 0")
        _watch_here(here, as_json=json)
        return
    if links is None or not readings:
        raise InputError("fabric watch: give a file of links and readings of ports, or --here")
    _watch_files(links, readings, as_json=json)


def _watch_files(path: Path, files: list[Path], *, as_json: bool) -> None:
    from itertools import pairwise

    from tutti.diagnose.fabric.pauses import find_pauses
    from tutti.fabric.port_counters import changes
    from tutti.observe.network.switch_readings import PortLinks
    from tutti.observe.network.switch_readings import readings as read

    links = PortLinks.load(path)
    heard = read(links, files)
    series, clocks = heard.series, heard.clocks
    if len(series) < 2:
        raise InputError(
            f"{files[0].name}: {len(series)} readings; counters say something from two on"
        )
    rows: list[dict[str, Any]] = []
    bad = False
    for device, by in clocks.items() if not as_json else ():
        words = f"{abs(by):,.0f} s {'ahead of' if by > 0 else 'behind'} most"
        typer.echo(f"{device}: its clock is {words}, or it was read at another time; "
                   "taken as read together")  # fmt: skip
    for (before_s, before), (after_s, after) in pairwise(series):
        ports, reset = changes(before, after, after_s - before_s)
        findings = find_pauses(ports, links.hosts)
        bad = bool(findings)
        if as_json:
            rows.append({
                "from": before_s, "to": after_s, "counters_set_back": reset,
                "findings": [{"kind": f.kind, "origin": list(f.origin), "victims": list(f.victims)}
                             for f in findings],
            })  # fmt: skip
            continue
        typer.echo(f"{after_s - series[0][0]:8.1f} s  " + _summary(ports))
        for one in findings:
            typer.echo(f"            {one.words()}")
        for name in reset:
            typer.echo(f"            {name}: its counters were set back; left out")
    if as_json:
        print_json({"intervals": rows, "clocks_ahead_s": clocks})
    if bad:
        raise typer.Exit(1)


def _summary(ports: list[PortChange]) -> str:
    paused = sum(port.paused > 0 for port in ports)
    marks, lost = sum(port.marks for port in ports), sum(port.discards for port in ports)
    return (
        f"{len(ports)} links, {paused} paused at times, {marks:,.0f} marks/s, "
        f"{lost:,.0f} discards/s"
    )


def _watch_here(seconds: float, *, as_json: bool) -> None:
    """Watch the NICs of this host: how long switches stop them, and they their switch."""
    import time

    from tutti.observe.figures import label_of
    from tutti.observe.samplers.nic import NicSampler
    from tutti.observe.samplers.sampling import Rates

    sampler, rates = NicSampler(), Rates()
    rates.of(sampler.sample(), time.monotonic())
    time.sleep(seconds)
    changed = rates.of(sampler.sample(), time.monotonic())
    words = ("paus", "congestion", "discards", "dropped")
    named = {name: value for name, value in changed.items() if any(word in name for word in words)}
    if not named:
        raise InputError("no NIC of this host counts pauses, marks or discards")
    if as_json:
        print_json(named)
        return
    for name, value in sorted(named.items()):
        figure = name.partition("{")[0].removeprefix("tutti_").removesuffix("_total")
        typer.echo(f"{label_of(name):16} {figure:32} {value:12,.1f} /s")
