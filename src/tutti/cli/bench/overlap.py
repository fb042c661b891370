"""`tutti bench overlap`: what of a block's own traffic hides behind the products beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.cli.shared.progress import ProgressLine
from tutti.units import many

if TYPE_CHECKING:
    from rich.table import Table

    from tutti.bench.overlap import OverlapOutcome, OverlapRow

DEFINITION = (
    "communication: all collectives, the same pieces one after the other; exposed: step − compute; "
    "hidden: communication − exposed; could hide: of each collective and the product beside it the "
    "shorter, and all of the inputs that are gathered again for the weights' gradients"
)


def overlap(
    op: Annotated[
        str, typer.Option(help="products of tensor-parallel ranks, or experts that ranks share.")
    ] = "products",
    ranks: Annotated[str, typer.Option(help="Ranks, each on a host.")] = "2,4",
    chunks: Annotated[
        str, typer.Option(help="Pieces of each product; experts have one.")
    ] = "1,2,4,8",
    tokens: Annotated[
        int | None, typer.Option(help="Of a micro-batch: 1024, or 512 where experts share them.")
    ] = None,
    hidden: Annotated[int, typer.Option(help="Width of the block.", min=64)] = 1024,
    rate: Annotated[float, typer.Option(help="Mbit/s of every wire.", min=1.0)] = 100.0,
    balance: Annotated[
        float, typer.Option(help="Seconds of products per second of collectives.", min=0.01)
    ] = 1.3,
    repeats: Annotated[int, typer.Option(help="Samples of each figure.", min=1)] = 3,
    json: Json = False,
) -> None:
    """Run a block's forward and backward on emulated wires: real messages, products on timers.

    Linux, root: hosts are network namespaces, joined by wires of a limited rate.
    """
    from tutti.cli.shared.torch_needed import require_torch

    require_torch("bench overlap")
    from tutti.bench.overlap import Question, overlap_on_bed
    from tutti.errors import InputError, hint

    if op not in ("products", "experts"):
        raise InputError(f"--op: '{op}'; {hint(op, ('products', 'experts'))}")
    pieces = numbers(chunks, "--chunks") if op == "products" else (1,)
    outcomes = []
    with ProgressLine("measuring", wanted=not json) as line:
        for count in numbers(ranks, "--ranks", smallest=2):
            line.say(many(count, "rank"))
            asked = Question(
                ranks=count,
                subject="experts" if op == "experts" else "products",
                chunks=pieces,
                tokens=tokens or (1024 if op == "products" else 512),
                hidden=hidden,
                rate=rate,
                balance=balance,
                repeats=repeats,
            )
            outcomes.append(overlap_on_bed(asked))
    if json:
        print_json({"definition": DEFINITION, "runs": [_plain(outcome) for outcome in outcomes]})
        return
    print_rich(_table(outcomes, f"{op} of one block, forward and backward, {rate:g} Mbit/s"))
    print_rich(DEFINITION)
    for outcome in outcomes:
        same = "bit-equal to" if outcome.same_bits else "NOT bit-equal to"
        print_rich(
            f"{many(outcome.rows[0].ranks, 'rank')}: link {outcome.latency_s * 1e6:.0f} µs, "
            f"{outcome.bandwidth / 1e6:.2f} MB/s; real products {same} the same pieces in turn"
        )


def numbers(text: str, option: str, smallest: int = 1) -> tuple[int, ...]:
    """Read "1,2,4"."""
    from tutti.errors import InputError

    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not part.isdigit() or int(part) < smallest:
            raise InputError(f"{option}: '{part}'; write whole numbers from {smallest} on, as 2,4")
    return tuple(map(int, parts))


def _plain(outcome: OverlapOutcome) -> dict[str, Any]:
    return {
        "link": {"latency_s": outcome.latency_s, "bandwidth": outcome.bandwidth},
        "same_bits": outcome.same_bits,
        "wire_bytes": outcome.wires,
        "rows": [_values(row) for row in outcome.rows],
    }


def _values(row: OverlapRow) -> dict[str, Any]:
    return {
        "op": row.subject,
        "ranks": row.ranks,
        "chunks": row.chunks,
        "step_s": row.step_s,
        "in_turn_s": row.in_turn_s,
        "compute_s": row.compute_s,
        "communication_s": row.communication_s,
        "could_hide_s": row.could_hide_s,
        "hidden_s": row.hidden_s,
        "hidden_share": row.hidden_share,
        "exposed_s": row.exposed_s,
        "priced_exposed_s": row.priced_exposed_s,
        "overrun": row.overrun,
    }


def _table(outcomes: list[OverlapOutcome], title: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, title=title)
    names = ("ranks", "chunks", "step ms", "in turn", "compute", "communication", "exposed",
             "priced", "could hide", "hidden", "share", "overrun")  # fmt: skip
    for name in names:
        table.add_column(name, justify="right")
    for outcome in outcomes:
        best = min(outcome.rows, key=lambda row: row.step_s)
        for row in outcome.rows:
            seconds = (
                row.step_s, row.in_turn_s, row.compute_s, row.communication_s, row.exposed_s,
                row.priced_exposed_s, row.could_hide_s, row.hidden_s,
            )  # fmt: skip
            table.add_row(
                str(row.ranks),
                str(row.chunks),
                *(f"{value * 1e3:,.0f}" for value in seconds),
                f"{row.hidden_share:.0%}",
                f"{row.overrun:.1%}",
                style="bold" if row is best else None,
            )
    return table
