"""`tutti chips`: the chip catalog, and one chip with the source of each of its figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.shared.output import Json, print_json, print_rich

if TYPE_CHECKING:
    from tutti.hardware.chip import Chip
    from tutti.hardware.node import NodeType

_PEAKS = ("bf16", "fp16", "fp8", "fp32")


def chips(
    name: Annotated[str | None, typer.Argument(help="A chip's name or alias.")] = None,
    nodes: Annotated[
        bool, typer.Option("--nodes", help="The node types instead (those of the chip).")
    ] = False,
    json: Json = False,
) -> None:
    """List the known chips, or show one with the source of each figure."""
    from tutti.document import Place
    from tutti.hardware.library import shipped

    library = shipped()
    if nodes:
        held = list(library.nodes.values())
        if name is not None:
            chip = library.chip(name, Place("chips").key("chip"))
            held = [node for node in held if node.chip.name == chip.name]
            held = held or [library.node_for(chip)]
        print_json([_node_document(node) for node in held]) if json else print_rich(*_nodes(held))
        return
    if name is not None:
        chip = library.chip(name, Place("chips").key("chip"))
        print_json(_chip_document(chip)) if json else print_rich(*_details(chip))
        return
    if json:
        print_json([_chip_document(chip) for chip in library.chips.values()])
    else:
        print_rich(*_table(list(library.chips.values())))


def _chip_document(chip: Chip) -> dict[str, Any]:
    from tutti.document import plain

    return {**plain(chip), "measured": chip.measured, "basis": chip.basis}


def _table(chips: list[Chip]) -> list[Any]:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from tutti.hardware.chip import Dtype
    from tutti.units import bytes_text, rate_text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("chip", style="bold")
    table.add_column("vendor")
    for peak in _PEAKS:
        table.add_column(peak, justify="right")
    table.add_column("memory", justify="right")
    table.add_column("bandwidth", justify="right")
    table.add_column("power", justify="right")
    table.add_column("basis")
    previous = None
    for chip in chips:
        if previous is not None and chip.vendor != previous:
            table.add_section()
        previous = chip.vendor
        peaks = (
            f"{chip.peak[Dtype(peak)] / 1e12:,.4g}" if Dtype(peak) in chip.peak else "–"
            for peak in _PEAKS
        )
        table.add_row(
            chip.name,
            chip.vendor,
            *peaks,
            bytes_text(chip.memory_bytes),
            rate_text(chip.memory_bandwidth),
            f"{chip.watts:.0f} W" if chip.watts is not None else "–",
            Text(chip.basis, style="yellow" if "assumed" in chip.basis else ""),
        )
    foot = "Dense peaks in TFLOP/s. Nominal figures are the vendors', not measured. "
    return [table, Text(foot + "`tutti chips NAME` shows who states each.", style="dim")]


def _details(chip: Chip) -> list[Any]:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    title = Text(chip.name, style="bold")
    title.append(f"  {chip.vendor} {chip.architecture}".rstrip(), style="default")
    if chip.aliases:
        title.append(f"\nalso called {', '.join(chip.aliases)}", style="dim")
    if chip.note:
        title.append(f"\n{chip.note}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("basis")
    table.add_column("source")
    for figure in chip.figures:
        source = chip.source(figure)
        assumed = source.startswith("assumed")
        basis = "measured" if chip.measured else "assumed" if assumed else "nominal"
        table.add_row(
            _FIGURE_NAMES.get(figure, figure.replace("peak.", "peak, ")),
            _figure_text(chip, figure),
            Text(basis, style="yellow" if assumed else ""),
            source.removeprefix("assumed: "),
        )
    return [title, table]


_FIGURE_NAMES = {
    "memory_bytes": "memory",
    "memory_bandwidth": "memory bandwidth",
    "compute_units": "compute units",
    "sustained": "sustained peak",
    "launch_overhead_s": "launch overhead",
    "watts": "power",
}


def _figure_text(chip: Chip, figure: str) -> str:
    from tutti.hardware.chip import Dtype
    from tutti.units import bytes_text, flops_text, rate_text, seconds_text

    if figure.startswith("peak."):
        text = flops_text(chip.peak[Dtype(figure.removeprefix("peak."))])
        return text.replace("FLOP", "OP") if figure == "peak.int8" else text
    if figure == "memory_bytes":
        return bytes_text(chip.memory_bytes)
    if figure == "memory_bandwidth":
        return rate_text(chip.memory_bandwidth)
    if figure == "compute_units":
        return f"{chip.compute_units}"
    if figure == "sustained":
        return f"{chip.sustained:.1%}"
    if figure == "launch_overhead_s":
        return seconds_text(chip.launch_overhead_s)
    return f"{chip.watts:.0f} W"


# --- node types --------------------------------------------------------------------------------


def _node_document(node: NodeType) -> dict[str, Any]:
    from tutti.document import plain

    return {**plain(node), "chip": node.chip.name}


def _nodes(nodes: list[NodeType]) -> list[Any]:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("node type", style="bold", no_wrap=True)
    for name in ("chips", "native links", "else", "NICs", "host", "to the host"):
        table.add_column(name, overflow="fold")
    for node in nodes:
        assumed = node.source.startswith("assumed")
        table.add_row(
            Text(node.name, style="yellow" if assumed else ""),
            f"{node.num_chips} × {node.chip.name}",
            _islands(node),
            _way(node.effective_bridge.kind, node.effective_bridge.bandwidth),
            _ports(node),
            _hosts(node),
            _way("", node.host.device_bandwidth),
        )
    foot = "Rates per chip (of a NIC: per port) and direction. Yellow: assumed. `node: NAME` of a "
    return [table, Text(foot + "pool in a cluster file names one.", style="dim")]


def _islands(node: NodeType) -> str:
    from tutti.units import rate_text

    if not node.islands:
        return "–"
    counts: dict[str, int] = {}
    for island in node.islands:
        pair = island.pair_bandwidth
        beside = f" ({rate_text(pair)} a pair)" if pair is not None else ""
        words = f"{island.kind} of {len(island.slots)}: {rate_text(island.bandwidth)}{beside}"
        counts[words] = counts.get(words, 0) + 1
    return ", ".join(
        f"{count} × {words}" if count > 1 else words for words, count in counts.items()
    )


def _way(kind: str, bandwidth: float) -> str:
    from tutti.units import rate_text

    return f"{kind} {rate_text(bandwidth)}".strip()


def _ports(node: NodeType) -> str:
    if not node.nics:
        return "none"
    rates = [nic.rate for nic in node.nics]
    return ", ".join(
        f"{rates.count(rate)} × {rate * 8 / 1e9:.4g} Gb/s" for rate in dict.fromkeys(rates)
    )


def _hosts(node: NodeType) -> str:
    from tutti.units import bytes_text, rate_text

    host = node.host
    several = f"{node.hosts} × " if node.hosts > 1 else ""
    return (
        f"{several}{host.cores} cores, {bytes_text(host.memory_bytes)}, "
        f"{rate_text(host.memory_bandwidth)}"
    )
