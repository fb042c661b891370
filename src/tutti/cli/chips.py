"""`tutti chips`: the chip catalog, and one chip with the source of each of its figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.output import Json, print_json, print_rich

if TYPE_CHECKING:
    from tutti.hardware.chip import Chip

_PEAKS = ("bf16", "fp16", "fp8", "fp32")


def chips(
    name: Annotated[str | None, typer.Argument(help="A chip's name or alias.")] = None,
    json: Json = False,
) -> None:
    """List the known chips, or show one with the source of each figure."""
    from tutti.document import Place
    from tutti.hardware.library import shipped

    library = shipped()
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
