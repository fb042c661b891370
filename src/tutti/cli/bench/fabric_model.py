"""`tutti bench fabric grains|published|scale`: the network model against itself and others."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from tutti.cli.shared.output import Json, print_json, print_rich

_CLOSE, _SAME = 0.1, 0.01  # bars: of a ring, of the slowest one


def grains(
    draws: Annotated[int, typer.Argument(help="Draws of rings over all nodes.", min=1)] = 8,
    nodes: Annotated[int, typer.Option(help="Of each draw.", min=8, max=512)] = 128,
    up_to: Annotated[bool, typer.Option("--up-to", help="Draw from 8 to that many nodes.")] = False,
    seed: Annotated[int, typer.Option(help="Of the first draw.", min=0)] = 0,
    json: Json = False,
) -> None:
    """Hold random rings at one steady pace against the same rings round by round."""
    from tutti.bench.fabric.grains import drawn_nodes, random_rings

    seeds = range(seed, seed + draws)
    drawn = [random_rings(one, drawn_nodes(one, nodes) if up_to else nodes) for one in seeds]
    off = [one for draw in drawn for one in draw.off]
    slowest = max(abs(draw.slowest) for draw in drawn)
    close = sum(abs(one) < _CLOSE for one in off)
    if json:
        print_json({"draws": [asdict(draw) for draw in drawn]})
        return
    over = f"8 to {nodes}" if up_to else f"{nodes}"
    typer.echo(
        f"{draws} draws over {over} nodes, {len(off)} rings: slowest ring off by {slowest:.2%} at "
        f"most (bar {_SAME:.0%}); {close} within {_CLOSE:.0%} = {close / len(off):.1%} (bar 95 %), "
        f"{sum(one <= -_CLOSE for one in off)} collapsed too fast, "
        f"{sum(one >= _CLOSE for one in off)} too slow"
    )


def published(json: Json = False) -> None:
    """Print what others published of fabrics beside what our model says, with nothing fitted."""
    from rich import box
    from rich.table import Table

    from tutti.bench.fabric.published import PUBLISHED

    rows = {name: (said, ours()) for name, (said, ours) in PUBLISHED.items()}
    if json:
        print_json({name: {"published": said, "ours": ours} for name, (said, ours) in rows.items()})
        return
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("what", "published", "ours"):
        table.add_column(heading, justify="right" if heading == "ours" else "left")
    for name, (said, ours) in rows.items():
        table.add_row(name, said, f"{100 * ours:.1f} %")
    print_rich(table)


def scale(json: Json = False) -> None:
    """Time the network model on 16,384 chips."""
    from rich import box
    from rich.table import Table

    from tutti.bench.fabric.scale import scale_figures

    figures = scale_figures()
    if json:
        print_json([asdict(figure) for figure in figures])
        return
    table = Table(title="CPU seconds of one core, kernels compiled", box=box.SIMPLE_HEAD)
    for heading in ("what", "flows", "seconds", "bar", "peak MiB"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for one in figures:
        table.add_row(one.words, f"{one.flows:,}", f"{one.seconds:.2f}", f"{one.bar_s:g}",
                      f"{one.peak_mib:,.0f}")  # fmt: skip
    print_rich(table)
