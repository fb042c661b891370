"""Tables of `tutti plan` about changed clusters: capacity questions and re-planning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tutti.cli.shared.progress import ProgressLine
from tutti.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from tutti.search.answer.result import SearchResult
    from tutti.search.question.space import Problem
    from tutti.search.question.what_if import Change
    from tutti.search.replan.replan import Replanned

Row = dict[str, Any]


def change_rows(
    problem: Problem,
    base: SearchResult,
    changes: Sequence[tuple[str, Change]],
    *,
    quiet: bool,
) -> list[Row]:
    """Plan for each changed cluster and return the figures beside those of the cluster as it is."""
    from tutti.search.question.renumbering import renumbered

    if not changes:
        return []
    rows = [_figures("as it is", problem.cluster.name, problem, base, base)]
    for text, change in changes:
        changed = replace(problem, cluster=change.cluster)
        row = _changed_row(text, change, changed, base, quiet=quiet)
        rows.append(row | {"renumbered": renumbered(change.moved)})
    return rows


def _changed_row(
    text: str, change: Change, problem: Problem, base: SearchResult, *, quiet: bool
) -> Row:
    from tutti.search.planner import plan

    try:
        with ProgressLine(f"planning with {text}", wanted=not quiet) as line:
            answer = plan(problem, report=line, compare=False)
    except InputError as error:
        return {"change": text, "means": change.words, "why": str(error)}
    return _figures(text, change.words, problem, answer, base)


def _figures(
    text: str, words: str, problem: Problem, answer: SearchResult, base: SearchResult
) -> Row:
    speed = answer.best.tokens_per_second
    return {
        "change": text,
        "means": words,
        "chips": problem.cluster.num_chips,
        "step_time_s": answer.best.step_seconds,
        "tokens_per_s": speed,
        "mfu": answer.best.estimate.mfu,
        "lower_bound_s": answer.lower_bound_seconds,
        "gap_pct": answer.gap_pct,
        "difference_pct": 100 * (speed / base.best.tokens_per_second - 1),
        "summary": answer.best.summary,
    }


def changes_table(rows: Sequence[Row]) -> Table:
    """Return the figures of all clusters, one per row."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, header_style="bold", pad_edge=False, title="what if")
    table.add_column("cluster")
    for name in ("chips", "step", "tokens/s", "MFU", "gap", "throughput"):
        table.add_column(name, justify="right")
    table.add_column("strategy", overflow="fold")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> Iterator[str]:
    from tutti.search.answer.explanation import step_text
    from tutti.units import count_text

    yield row["change"]
    if "why" in row:
        yield from ("–",) * 6
        yield row["why"]
        return
    yield f"{row['chips']:,}"
    yield step_text(row["step_time_s"])
    yield count_text(row["tokens_per_s"])
    yield f"{row['mfu']:.1%}"
    yield f"{row['gap_pct']:.1f} %"
    yield f"{row['difference_pct']:+.1f} %" if row["difference_pct"] else "–"
    yield row["summary"]


def replan_table(replanned: Replanned) -> Table:
    """Return what staying and moving cost, side by side."""
    from rich import box
    from rich.table import Table

    from tutti.search.answer.explanation import step_text
    from tutti.units import bytes_text, seconds_text

    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False, title="re-planning")
    table.add_column(style="bold")
    table.add_column()
    moved, staying = replanned.movement, replanned.staying
    table.add_row(
        "the old plan, on what is left",
        f"{step_text(staying.step_seconds)} per step ({staying.summary})"
        if staying is not None
        else "cannot go on",
    )
    new = replanned.result.best
    table.add_row("the new plan", f"{step_text(new.step_seconds)} per step ({new.summary})")
    table.add_row("state that moves", bytes_text(moved.total_bytes))
    for pool, received in moved.by_pool.items():
        table.add_row(f"  to {pool}", bytes_text(received))
    table.add_row("  of it from the checkpoint", bytes_text(moved.from_checkpoint_bytes))
    table.add_row("  the busiest chip", bytes_text(moved.busiest_chip_bytes))
    took = seconds_text(moved.seconds)
    pays = replanned.payback_seconds
    after = "never" if pays is None else seconds_text(pays) if pays else "at once"
    if not moved.storage_known:
        took = f"not known: {took} between chips, and the time to read the checkpoint"
        after = "not known" if pays is None else after
    table.add_row("time to move", took)
    table.add_row("paid back after", after)
    return table
