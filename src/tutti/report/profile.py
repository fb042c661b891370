"""The page of a measured chip: its matrix of operators and shapes as heat maps, and its links."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from tutti.cost.measured.forms import FORMS, row_elements, row_flops, row_name
from tutti.hardware.chip import Dtype
from tutti.hardware.profile import OperatorTime, Profile
from tutti.report.heat import Cell, heat_html, heats_html
from tutti.report.page import Page, Section
from tutti.report.tables import Column, Row, meter_html, table_html
from tutti.report.tiles import Tile, tiles_html
from tutti.units import flops_text, many, rate_text, seconds_text

PASS_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "input_gradient": "gradient of the input",
    "weight_gradient": "gradient of the weight",
}


def write_profile_page(path: Path, profile: Profile) -> None:
    """Write the page of a profile."""
    profile_page(profile).write(path)


def profile_page(profile: Profile) -> Page:
    """Return the page of a profile."""
    sections = [Section(id="summary", heading="", body=tiles_html(_tiles(profile)))]
    for dtype in profile.dtypes:
        rows = [row for row in profile.operators if row.dtype is dtype]
        sections += _products(rows, dtype)
        sections += _attention(rows, dtype)
        sections += _served(profile, rows, dtype)
        sections += _rows_and_widths(rows, dtype)
        sections.append(_every_operator(rows, dtype))
    if profile.links:
        sections.append(_links(profile))
    return Page(
        title=f"Profile of {profile.chip}",
        subtitle=" · ".join(filter(None, (profile.stack, profile.date, profile.origin))),
        sections=tuple(sections),
        footer="Made by tutti. This file is complete in itself; it works offline.",
    )


# --- figures ---------------------------------------------------------------------------------


def _flops(row: OperatorTime) -> float:
    """FLOP per second that a measurement reached; 0 for what only moves bytes."""
    return float(row_flops(row.operator, row.shape)) / row.seconds


def _bytes(row: OperatorTime) -> float:
    """Bytes per second of what a forward pass must read and write."""
    size = 1.0 if row.operator == "copy" else row.dtype.num_bytes
    return float(row_elements(row.operator, row.shape)) * size / row.seconds


def _is_product(row: OperatorTime) -> bool:
    return row.operator.partition(".")[0] == "linear"


def _tiles(profile: Profile) -> list[Tile]:
    tiles = []
    for dtype in profile.dtypes:
        products = [r for r in profile.operators if r.dtype is dtype and _is_product(r)]
        if products:
            best = max(products, key=_flops)
            tiles.append(
                Tile(f"Matrix ceiling, {dtype.value}", flops_text(_flops(best)), _sizes(best))
            )
    memory = profile.link("memory")
    if memory is not None:
        tiles.append(Tile("Memory", rate_text(memory.bandwidth), "read and written, a large copy"))
    tiles.append(Tile("Launch floor", seconds_text(profile.launch_floor_s), "the smallest kernel"))
    for kind, name in (("host_to_device", "Host to device"), ("device_to_host", "Device to host")):
        link = profile.link(kind)
        if link is not None:
            detail = f"pinned; {seconds_text(link.latency_s)} to begin"
            tiles.append(Tile(name, rate_text(link.bandwidth), detail))
    count = len(profile.operators)
    spread = statistics.median([r.spread for r in profile.operators]) if count else 0.0
    tiles.append(Tile("Measurements", f"{count:,}", f"median spread {spread:.1%}"))
    return tiles


def _sizes(row: OperatorTime) -> str:
    return " × ".join(f"{size:,}" for size in row.shape)


def _detail(row: OperatorTime, rate: str) -> str:
    kernel = f", {row.kernel}" if row.kernel else ""
    return (
        f"{row.operator} {_sizes(row)}: {seconds_text(row.seconds)} ± {row.spread:.1%} "
        f"of {row.repeats}, {rate}{kernel}"
    )


# --- heat maps -------------------------------------------------------------------------------


def _products(rows: Sequence[OperatorTime], dtype: Dtype) -> list[Section]:
    every = [row for row in rows if _is_product(row)]
    if not every:
        return []
    ceiling = max(map(_flops, every))
    maps = []
    for direction in FORMS["linear"].directions:
        own = [row for row in every if row.operator == row_name("linear", direction)]
        if not own:
            continue
        cells: dict[tuple[int, int], dict[str, Cell]] = {}
        for row in own:
            tokens, out, wide = row.shape
            rate = _flops(row)
            cells.setdefault((wide, out), {})[f"{tokens:,}"] = Cell(
                rate / ceiling, f"{100 * rate / ceiling:.0f}", _detail(row, flops_text(rate))
            )
        columns = [f"{tokens:,}" for tokens in sorted({row.shape[0] for row in own})]
        lines = [(f"{wide:,} → {out:,}", cells[wide, out]) for wide, out in sorted(cells)]
        maps.append((PASS_NAMES[direction], heat_html("in → out \\ tokens", columns, lines)))
    if not maps:
        return []
    return [
        Section(
            id=f"products-{dtype.value}",
            heading=f"Products, {dtype.value}",
            intro=f"Percent of the matrix ceiling ({flops_text(ceiling)}), by width in → out "
            "and by tokens.",
            body=heats_html(maps),
        )
    ]


def _attention(rows: Sequence[OperatorTime], dtype: Dtype) -> list[Section]:
    products = [_flops(row) for row in rows if _is_product(row)]
    maps = []
    for direction in FORMS["attention"].directions:
        own = [row for row in rows if row.operator == row_name("attention", direction)]
        if not own:
            continue
        # Backward makes the scores again: five products against forward's two.
        work = 1.0 if direction == "forward" else 2.5
        ceiling = max([*products, *(work * _flops(row) for row in own)])
        cells: dict[str, dict[str, Cell]] = {}
        for row in own:
            sequences, length, heads, kv_heads, dim, _ = row.shape
            rate = work * _flops(row)
            name = f"{sequences} × {many(heads, 'head')} of {dim}, {kv_heads} for keys"
            cells.setdefault(name, {})[f"{length:,}"] = Cell(
                rate / ceiling, f"{100 * rate / ceiling:.0f}", _detail(row, flops_text(rate))
            )
        columns = [f"{length:,}" for length in sorted({row.shape[1] for row in own})]
        body = heat_html("sequences × heads \\ length", columns, sorted(cells.items()))
        maps.append((PASS_NAMES[direction], body))
    if not maps:
        return []
    return [
        Section(
            id=f"attention-{dtype.value}",
            heading=f"Attention, {dtype.value}",
            intro="Percent of the matrix ceiling, causal pairs only, by length of a sequence.",
            body=heats_html(maps),
        )
    ]


def _served(profile: Profile, rows: Sequence[OperatorTime], dtype: Dtype) -> list[Section]:
    """What servers run: how near products and attention come to what the chip allows."""
    memory = profile.link("memory")
    ceiling = max((_flops(row) for row in rows if _is_product(row)), default=0.0)
    if memory is None or not ceiling:
        return []

    def cell(row: OperatorTime) -> Cell:
        share = max(_flops(row) / ceiling, _bytes(row) / memory.bandwidth)
        detail = _detail(row, f"{flops_text(_flops(row))}, {rate_text(_bytes(row))}")
        return Cell(min(1.0, share), f"{100 * share:.0f}", detail)

    maps = []
    for operator, name, corner in (
        ("linear", "products, by tokens", "in → out \\ tokens"),
        ("decode_attention", "answers, by keys of each", "answers × heads \\ keys"),
    ):
        own = [row for row in rows if row.operator == row_name(operator, "inference")]
        cells: dict[tuple[int, ...], dict[str, Cell]] = {}
        labels: dict[tuple[int, ...], str] = {}
        for row in own:
            key = row.shape[:0:-1] if operator == "linear" else (row.shape[0], *row.shape[2:5])
            at = row.shape[0] if operator == "linear" else row.shape[1]
            labels[key] = (
                f"{key[0]:,} → {key[1]:,}"
                if operator == "linear"
                else f"{key[0]} × {many(key[1], 'head')} of {key[3]}, {key[2]} for keys"
            )
            cells.setdefault(key, {})[f"{at:,}"] = cell(row)
        counts = {row.shape[0 if operator == "linear" else 1] for row in own}
        columns = [f"{count:,}" for count in sorted(counts)]
        if own:
            lines = [(labels[key], cells[key]) for key in sorted(cells)]
            maps.append((name, heat_html(corner, columns, lines)))
    if not maps:
        return []
    return [
        Section(
            id=f"served-{dtype.value}",
            heading=f"What servers run, {dtype.value}",
            intro="Percent of what the matrix ceiling or, where that is less, memory allows"
            + (", inside graphs." if profile.served_graphs else "."),
            body=heats_html(maps),
        )
    ]


def _rows_and_widths(rows: Sequence[OperatorTime], dtype: Dtype) -> list[Section]:
    """Operators over rows: the bytes per second of what they must move."""
    names = [name for name, form in FORMS.items() if form.dims == ("rows", "width")]
    groups = {
        full: [row for row in rows if row.operator == full]
        for name in names
        for full in (row_name(name, "forward"), row_name(name, "backward"))
    }
    groups = {name: own for name, own in groups.items() if own}
    if not groups:
        return []
    most = max(_bytes(row) for own in groups.values() for row in own)
    columns = [f"{n:,}" for n in sorted({r.shape[0] for own in groups.values() for r in own})]
    lines = []
    for name, own in groups.items():
        for width in sorted({row.shape[1] for row in own}):
            cells = {
                f"{row.shape[0]:,}": Cell(
                    _bytes(row) / most,
                    f"{_bytes(row) / 1e9:,.0f}",
                    _detail(row, rate_text(_bytes(row))),
                )
                for row in own
                if row.shape[1] == width
            }
            lines.append((f"{name} {width:,}", cells))
    return [
        Section(
            id=f"rows-{dtype.value}",
            heading=f"Norms and activations, {dtype.value}",
            intro="GB/s of what a forward pass must read and write, by width and rows; backward "
            "is shown by the same bytes.",
            body=heat_html("width \\ rows", columns, lines),
        )
    ]


# --- tables ----------------------------------------------------------------------------------


def _every_operator(rows: Sequence[OperatorTime], dtype: Dtype) -> Section:
    groups: dict[str, list[OperatorTime]] = {}
    for row in rows:
        groups.setdefault(row.operator, []).append(row)
    ceiling = max(map(_flops, rows), default=0.0) or 1.0
    memory = max(map(_bytes, rows), default=0.0) or 1.0
    return Section(
        id=f"operators-{dtype.value}",
        heading=f"Every operator, {dtype.value}",
        body=table_html(
            [
                Column("operator", kind="whole"),
                Column("shapes", figures=True),
                Column("best rate"),
                Column("best traffic"),
                Column("spread", figures=True, detail="median over the shapes"),
                Column("host", figures=True, detail="median time to issue a call"),
                Column("kernel"),
            ],
            [Row(_summary(name, own, ceiling, memory)) for name, own in groups.items()],
        ),
    )


def _summary(name: str, own: Sequence[OperatorTime], ceiling: float, memory: float) -> list[str]:
    flops, moved = max(map(_flops, own)), max(map(_bytes, own))
    issue = statistics.median(row.issue_s for row in own)
    return [
        name,
        str(len(own)),
        meter_html(flops / ceiling, flops_text(flops), color="forward") if flops else "–",
        meter_html(moved / memory, rate_text(moved)),
        f"{statistics.median(row.spread for row in own):.1%}",
        seconds_text(issue) if issue else "–",
        ", ".join(_kernels(own)),
    ]


def _kernels(own: Iterable[OperatorTime]) -> list[str]:
    return sorted({row.kernel for row in own if row.kernel})


def _links(profile: Profile) -> Section:
    return Section(
        id="links",
        heading="Links",
        body=table_html(
            [Column("link"), Column("bandwidth", figures=True), Column("latency", figures=True)],
            [
                Row([link.kind, rate_text(link.bandwidth), seconds_text(link.latency_s)])
                for link in profile.links
            ],
        ),
    )
