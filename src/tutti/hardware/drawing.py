"""A cluster drawn for the terminal: fabric on top, pools below it, the links between, totals.

One node stands for all of its pool, so that a laptop and 16,384 chips take the same space. Returns
rich renderables; imported only by the command line.
"""

from __future__ import annotations

import itertools
import math

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tutti.hardware.chip import Dtype
from tutti.hardware.cluster import Cluster
from tutti.hardware.node import Island, NodeType
from tutti.hardware.pool import Pool
from tutti.hardware.storage import AnyTarget, NodeStorage, Storage, StorageNetwork, StorageTarget
from tutti.hardware.topology import Position
from tutti.units import bytes_text, count_text, flops_text, many, rate_text, seconds_text

_COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "red")
_MOST_BOXES = 16  # chips of one island drawn as numbered boxes; more become dots
_BAR = 30


def bits_text(rate: float) -> str:
    """Format a NIC's bytes per second as people order them: 200 Gb/s."""
    return f"{rate * 8 / 1e9:.4g} Gb/s"


def draw_cluster(cluster: Cluster) -> Group:
    """Return the whole drawing."""
    parts: list[RenderableType] = [_title(cluster)]
    if _has_network(cluster):
        parts.append(_fabric(cluster))
    panels = [
        _pool_panel(pool, _COLOURS[index % len(_COLOURS)])
        for index, pool in enumerate(cluster.pools)
    ]
    parts.append(Columns(panels, padding=(0, 1)))
    if len(cluster.pools) > 1:
        parts.append(_cross_links(cluster))
    if cluster.storage != Storage():
        parts.append(_storage(cluster.storage))
    parts.append(_totals(cluster))
    return Group(*parts)


def _title(cluster: Cluster) -> Text:
    title = Text(cluster.name, style="bold")
    size = f"{many(cluster.num_chips, 'chip')} in {many(cluster.num_nodes, 'node')}"
    title.append(f"  {size}", style="bold")
    if cluster.summary:
        title.append(f"\n{cluster.summary}", style="dim")
    title.append("\n")
    return title


def _has_network(cluster: Cluster) -> bool:
    """Tell whether anything crosses a switch at all."""
    if any(pool.nodes > 1 for pool in cluster.pools):
        return True
    names = [pool.name for pool in cluster.pools]
    return any(
        not cluster.cross_link(a, b).same_host for i, a in enumerate(names) for b in names[i + 1 :]
    )


# --- fabric ----------------------------------------------------------------------------------


def _fabric(cluster: Cluster) -> Panel:
    fabric = cluster.fabric
    grid = Table.grid(padding=(0, 2))
    for index in reversed(range(len(fabric.tiers))):
        tier = fabric.tiers[index]
        top = index == len(fabric.tiers) - 1
        groups = 1 if top else _groups(cluster, tier.nodes)
        reach = "joins all" if groups == 1 else f"{groups:,} groups of ≤ {tier.nodes} nodes"
        factor = fabric.oversubscription_to(index)
        blocking = "non-blocking" if factor == 1 else f"{factor:.3g}:1 oversubscribed"
        grid.add_row(
            Text(tier.name, style="bold"),
            _segments(groups),
            Text(reach),
            Text(blocking, style="yellow" if factor > 1 else ""),
            seconds_text(tier.latency_s),
        )
    rails = "NIC i of every node on leaf i" if fabric.rail_optimized else None
    return Panel(
        grid, title="fabric", title_align="left", subtitle=rails, box=box.ROUNDED, expand=False
    )


def _groups(cluster: Cluster, nodes: int | None) -> int:
    if nodes is None:
        return 1
    named = {leaf for pool in cluster.pools for leaf in pool.leaves.numbers}
    each = cluster.fabric.tiers[0].nodes or 1
    own = sum(math.ceil(p.nodes / nodes) for p in cluster.pools if not len(p.leaves))
    return own + len({leaf * each // nodes for leaf in named})


def _segments(groups: int) -> Text:
    """Return a bar cut into one piece per switch group, or into as many as can be seen."""
    shown = min(groups, _BAR // 2)
    width = _BAR / shown
    cuts = [round(i * width) for i in range(shown + 1)]
    pieces = ["━" * max(1, right - left - 1) for left, right in itertools.pairwise(cuts)]
    return Text(" ".join(pieces), style="blue", no_wrap=True, overflow="crop")


# --- pools -----------------------------------------------------------------------------------


def _pool_panel(pool: Pool, colour: str) -> Panel:
    node = pool.node
    parts: list[RenderableType] = [_node_strip(pool, colour), _node_picture(node, colour)]
    parts.append(_facts(pool))
    title = Text(f"{pool.name} · {pool.num_chips:,} × {pool.chip.name}", style=f"bold {colour}")
    return Panel(Group(*parts), title=title, title_align="left", border_style=colour, expand=False)


def _node_strip(pool: Pool, colour: str) -> Text:
    """Return one square per node, or per so many nodes that the squares fit one line."""
    per_square = max(1, math.ceil(pool.nodes / 16))
    squares = math.ceil(pool.nodes / per_square)
    text = Text("▪" * squares, style=colour)
    text.append(f" {many(pool.nodes, 'node')}", style="default")
    if per_square > 1:
        text.append(f" (▪ = {per_square})", style="dim")
    return text


def _node_picture(node: NodeType, colour: str) -> RenderableType:
    """Return the chips of one node, framed by the island that joins them."""
    frames: list[RenderableType] = [
        Panel(
            _chips(node, tuple(island.slots), colour),
            title=Text(_island_text(island), style="default"),
            title_align="left",
            box=box.HEAVY,
            border_style="dim",
            expand=False,
            padding=(0, 0),
        )
        for island in node.islands
    ]
    inside = {slot for island in node.islands for slot in island.slots}
    single = tuple(slot for slot in range(node.num_chips) if slot not in inside)
    if single:
        frames.append(_chips(node, single, colour))
    if len(node.islands_or_singles) > 1:
        bridge = node.effective_bridge
        text = f"between {'islands' if node.islands else 'chips'}: {bridge.kind} "
        frames.append(Text(text + rate_text(bridge.bandwidth), style="dim"))
    return Group(*frames)


def _island_text(island: Island) -> str:
    pair = ""
    if island.pair_bandwidth is not None:
        pair = f", pair {rate_text(island.pair_bandwidth)}"
    return f"{island.kind} {rate_text(island.bandwidth)}{pair}"


def _chips(node: NodeType, slots: tuple[int, ...], colour: str) -> Text:
    if len(slots) > _MOST_BOXES:
        rows = [slots[i : i + 18] for i in range(0, len(slots), 18)]
        dots = [" ".join("■" for _ in row) for row in rows[:16]]
        if len(rows) > 16:
            dots.append(f"… {len(slots):,} chips")
        return Text("\n".join(dots), style=colour)
    lines: list[Text] = []
    for start in range(0, len(slots), 8):
        row = slots[start : start + 8]
        lines.append(Text("".join("┌──┐" for _ in row), style=colour))
        lines.append(Text("".join(f"│{slot:>2}│" for slot in row), style=colour))
        wires = [bool(node.nics_of(slot)) for slot in row]
        lines.append(Text("".join("└┬─┘" if wired else "└──┘" for wired in wires), style=colour))
        rails = [sorted(node.rails_of(slot)) for slot in row]
        if any(rails):
            marks = (f"r{rail[0]}" if rail else "" for rail in rails)
            lines.append(Text("".join(f" {mark:<3}" for mark in marks), style="dim"))
    return Text("\n").join(lines)


def _facts(pool: Pool) -> Table:
    node, chip = pool.node, pool.chip
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="dim")
    grid.add_column()
    half = chip.compute_dtype(Dtype.BF16)
    peak = f"{flops_text(chip.peak[half])} {half.value}" if half else "no 16-bit format"
    grid.add_row("chip", peak)
    grid.add_row("", f"{bytes_text(chip.memory_bytes)} at {rate_text(chip.memory_bandwidth)}")
    grid.add_row("", Text(f"({chip.basis})", style="dim" if chip.measured else "yellow"))
    grid.add_row("NICs", _nics_text(node))
    host = node.host
    each = f"{node.hosts} hosts of " if node.hosts > 1 else ""
    cores = f"{each}{many(host.cores, 'core')}, {host.numa_nodes} NUMA"
    grid.add_row("host", cores)
    grid.add_row(
        "", f"{bytes_text(host.memory_bytes)}, {rate_text(host.device_bandwidth)} to a chip"
    )
    if pool.stack:
        grid.add_row("stack", Text(pool.stack))
    return grid


def _nics_text(node: NodeType) -> str:
    if not node.nics:
        return "none"
    rates = sorted({nic.rate for nic in node.nics})
    rate = (
        bits_text(rates[0]) if len(rates) == 1 else f"{bits_text(rates[0])}…{bits_text(rates[-1])}"
    )
    each = f"{len(node.nics) / node.num_chips:.3g} per chip"
    return f"{len(node.nics)} × {rate}, {each}"


# --- links, storage, totals ------------------------------------------------------------------


def _cross_links(cluster: Cluster) -> Padding:
    grid = Table.grid(padding=(0, 1))
    colours = {p.name: _COLOURS[i % len(_COLOURS)] for i, p in enumerate(cluster.pools)}
    names = list(colours)
    written = {frozenset(link.pools) for link in cluster.fabric.links}
    for index, home in enumerate(names):
        for away in names[index + 1 :]:
            link = cluster.link(Position(home, 0, 0), Position(away, 0, 0))
            forwarded = link.host_forwarded
            way = "host-forwarded" if forwarded else f"direct, {link.medium}"
            stroke = "╌╌" if forwarded else "━━"
            text = (
                f"{way}, {rate_text(link.chip_bandwidth)} per chip, {seconds_text(link.latency_s)}"
            )
            if frozenset((home, away)) not in written:
                text += " (by default)"
            arrow = Text(f"◄{stroke} {text} {stroke}►", style="yellow" if forwarded else "")
            grid.add_row(
                Text(home, style=f"bold {colours[home]}"),
                arrow,
                Text(away, style=f"bold {colours[away]}"),
            )
    return Padding(grid, (1, 0, 0, 1))


def _storage(storage: Storage) -> Text:
    lines = [f"{tier.words}: {_target_text(target)}" for tier, target in storage.tiers()]
    return Text("\n" + "\n".join(f" {line}" for line in lines))


def _target_text(target: AnyTarget) -> str:
    said = [
        f"reads {rate_text(target.read_bandwidth)}",
        f"writes {rate_text(target.write_bandwidth)}",
    ]
    if isinstance(target, NodeStorage):
        said[-1] += " in each node"
    elif target.per_node_bandwidth is not None:
        said.append(f"at most {rate_text(target.per_node_bandwidth)} per node")
    if target.latency_s:
        said.append(f"{seconds_text(target.latency_s)} an operation")
    if target.operations_per_second is not None:
        said.append(f"{count_text(target.operations_per_second)} operations/s")
    if target.capacity is not None:
        said.append(f"holds {bytes_text(target.capacity)}")
    if isinstance(target, StorageTarget) and target.network is StorageNetwork.TRAINING:
        said.append("over the NICs of training")
    return ", ".join(said)


def _totals(cluster: Cluster) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_footer=len(cluster.pools) > 1, pad_edge=False)
    dtypes = {pool.chip.compute_dtype(Dtype.BF16) for pool in cluster.pools}
    peak_name = " / ".join(sorted(d.value for d in dtypes if d))
    total = sum(_half_peak(pool) for pool in cluster.pools)
    table.add_column("pool", footer="all")
    table.add_column("chip", footer="")
    for head, footer in (
        ("nodes", f"{cluster.num_nodes:,}"),
        ("chips", f"{cluster.num_chips:,}"),
        (f"peak, {peak_name}" if peak_name else "peak", flops_text(total)),
        ("share", "100 %"),
        ("memory", bytes_text(cluster.memory_bytes)),
        ("power", _watts_text(cluster.watts)),
    ):
        table.add_column(head, justify="right", footer=footer, no_wrap=True)
    priced = any(pool.price_per_chip_hour is not None for pool in cluster.pools)
    if priced:
        footer = _price_text(cluster.price_per_hour)
        table.add_column(Text(f"{cluster.currency}/h"), justify="right", footer=footer)
    for pool in cluster.pools:
        cost, draw = pool.price_per_chip_hour, pool.chip_watts
        cells = [
            pool.name,
            pool.chip.name,
            f"{pool.nodes:,}",
            f"{pool.num_chips:,}",
            flops_text(_half_peak(pool)),
            f"{100 * _half_peak(pool) / total:.0f} %" if total else "–",
            bytes_text(pool.num_chips * pool.chip.memory_bytes),
            _watts_text(None if draw is None else draw * pool.num_chips),
        ]
        if priced:
            cells.append(_price_text(None if cost is None else cost * pool.num_chips))
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _price_text(price: float | None) -> str:
    return "–" if price is None else f"{price:,.2f}"


def _half_peak(pool: Pool) -> float:
    half = pool.chip.compute_dtype(Dtype.BF16)
    return pool.num_chips * pool.chip.peak[half] if half else 0.0


def _watts_text(watts: float | None) -> str:
    if watts is None:
        return "–"
    for factor, unit in ((1e6, "MW"), (1e3, "kW")):
        if watts >= factor:
            return f"{watts / factor:.3g} {unit}"
    return f"{watts:.3g} W"
