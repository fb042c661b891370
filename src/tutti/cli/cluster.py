"""`tutti cluster`: show a cluster file, an example or this machine as a drawing; list examples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.errors import InputError

if TYPE_CHECKING:
    from tutti.hardware.cluster import Cluster

app = typer.Typer(help="Clusters: what you own, drawn.", no_args_is_help=True)


@app.command()
def show(
    cluster: Annotated[
        str | None, typer.Argument(help="A cluster file, or the name of an example.")
    ] = None,
    here: Annotated[bool, typer.Option("--here", help="Show this machine.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Also write it as a cluster file (.yaml or .json)."),
    ] = None,
    json: Json = False,
) -> None:
    """Draw a cluster: fabric, pools, nodes, islands, links, totals."""
    from tutti.hardware.cluster import Cluster

    if output is not None and output.suffix not in (".yaml", ".yml", ".json"):
        raise InputError(f"-o {output}: a cluster file ends in .yaml or .json")
    if here == (cluster is not None):
        raise InputError("cluster show: give a cluster file or an example's name, or else --here")
    notes: tuple[str, ...] = ()
    if cluster is not None:
        shown_cluster = Cluster.load(cluster)
    else:
        from tutti.hardware.discover import discover

        shown_cluster, notes = (discovery := discover()).cluster, discovery.notes
    if output is not None:
        if cluster is not None:
            from tutti.files import require_apart

            require_apart(Path(cluster), output)
        shown_cluster.save(output)
    if json:
        print_json(
            {**shown_cluster.to_document(), "totals": _totals(shown_cluster), "notes": list(notes)}
        )
        return
    from rich.text import Text

    from tutti.hardware.drawing import draw_cluster

    print_rich(
        draw_cluster(shown_cluster), *(Text(f" note: {note}", style="dim") for note in notes)
    )


@app.command("list")
def list_clusters(json: Json = False) -> None:
    """List the example clusters that ship with tutti."""
    from tutti.hardware.cluster import Cluster
    from tutti.hardware.library import shipped_cluster_names

    clusters = [Cluster.load(name) for name in shipped_cluster_names()]
    if json:
        print_json([{"name": c.name, "chips": c.num_chips, "summary": c.summary} for c in clusters])
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("cluster", style="bold")
    table.add_column("chips", justify="right")
    table.add_column("")
    for cluster in clusters:
        table.add_row(cluster.name, f"{cluster.num_chips:,}", cluster.summary)
    print_rich(table)


def _totals(cluster: Cluster) -> dict[str, Any]:
    from tutti.hardware.chip import Dtype

    known = [p.chip.compute_dtype(Dtype.BF16) is not None for p in cluster.pools]
    peak = cluster.peak_flops(Dtype.BF16, fallback=True) if all(known) else None
    return {
        "chips": cluster.num_chips,
        "nodes": cluster.num_nodes,
        "peak_flops_16bit": peak,
        "memory_bytes": cluster.memory_bytes,
        "watts": cluster.watts,
        "price_per_hour": cluster.price_per_hour,
        "fingerprint": cluster.fingerprint(),
    }
