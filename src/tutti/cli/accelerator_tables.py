"""Tables of `tutti accelerator`: the inventory, the conformance report, the tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from tutti.accelerator.conformance import Report
    from tutti.accelerator.inventory import KindEntry
    from tutti.accelerator.tuning import Measured

MOST_FAILURES = 20
DTYPES = ("float64", "float32", "float16", "bfloat16")


def _table(*columns: str, right: tuple[str, ...] = ()) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table


def inventory_tables(entries: list[KindEntry]) -> list[Any]:
    """Return the kinds of devices, and the operators of each that is here."""
    from rich.text import Text

    kinds = _table("kind", "here", "chip", "torch calls it", "collectives", right=("here",))
    for entry in entries:
        chip = Text(entry.problem, style="red") if entry.problem else entry.chip or "–"
        kinds.add_row(
            entry.kind,
            str(entry.count),
            chip,
            entry.device_type or "–",
            entry.collective_backend or "–",
        )
    shown: list[Any] = [kinds]
    for entry in (entry for entry in entries if entry.operators):
        table = _table("operator", "runs", "why", "also here", "missing")
        for row in entry.operators:
            others = [name for name in row.implementations if name not in row.chosen.split(" or ")]
            table.add_row(
                row.operator, row.chosen, row.why, ", ".join(others), ", ".join(row.missing)
            )
        title = Text(f"operators on {entry.kind}", style="bold")
        title.append(f"  choices: {entry.measured}", style="dim")
        shown += [title, table]
    return shown


def report_tables(report: Report) -> list[Any]:
    """Return what conforms, what is not supported, and what failed."""
    from rich.text import Text

    from tutti.accelerator.conformance import Verdict
    from tutti.accelerator.conformance.report import DEVICE

    shown: list[Any] = [_operator_table(report)]
    own = [outcome for outcome in report.outcomes if outcome.subject == DEVICE]
    if own:
        table = _table("the device", "", "")
        for outcome in own:
            table.add_row(outcome.check, _mark(outcome.verdict), outcome.detail)
        shown.append(table)
    reasons = _unsupported_reasons(report)
    if reasons:
        table = _table("not supported", "calls", "because", right=("calls",))
        for (subject, implementation, reason), calls in reasons.items():
            table.add_row(f"{subject}, {implementation}", str(calls), reason)
        shown.append(table)
    failures = list(report.of(Verdict.FAILED))
    for outcome in failures[:MOST_FAILURES]:
        line = Text(f"{outcome.subject} · {outcome.name}: ", style="red")
        shown.append(line.append(outcome.detail, style="default"))
    if len(failures) > MOST_FAILURES:
        shown.append(f"… {len(failures) - MOST_FAILURES} more (--json has all)")
    verdict = "conforms" if report.passed else "does NOT conform"
    counts = ", ".join(f"{report.count(verdict):,} {verdict}" for verdict in Verdict)
    end = Text(f"{report.chip} ({report.device}) {verdict}", style="bold")
    shown.append(end.append(f"  {counts}; {report.software}, {report.seconds:.0f} s", style="dim"))
    return shown


def _operator_table(report: Report) -> Any:
    from rich.text import Text

    from tutti.accelerator.conformance import Verdict
    from tutti.accelerator.conformance.report import DEVICE

    table = _table("operator", "implementation", *DTYPES, "error", right=(*DTYPES, "error"))
    rows = dict.fromkeys(
        (o.subject, o.implementation) for o in report.outcomes if o.subject != DEVICE
    )
    for subject, implementation in rows:
        own = [
            o for o in report.outcomes
            if (o.subject, o.implementation) == (subject, implementation)
        ]  # fmt: skip
        cells = []
        for dtype in DTYPES:
            counts = {v: sum(o.verdict is v and o.dtype == dtype for o in own) for v in Verdict}
            good, bad = counts[Verdict.PASSED], counts[Verdict.FAILED]
            if bad:
                cells.append(Text(f"✗ {bad} of {good + bad}", style="bold red"))
            else:
                cells.append(Text(f"✓ {good}" if good else "–", style="green" if good else "dim"))
        worst = max((o.error for o in own), default=0.0)
        table.add_row(subject, implementation, *cells, f"{worst:.0%}" if worst < 1e3 else "∞")
    table.caption = "error: the largest, as a part of what is tolerated; –: no such call supported"
    table.caption_justify = "left"
    return table


def _mark(verdict: Any) -> Any:
    from rich.text import Text

    marks = {"passed": ("✓", "green"), "failed": ("✗", "bold red"), "unsupported": ("–", "dim")}
    text, style = marks[str(verdict)]
    return Text(text, style=style)


def _unsupported_reasons(report: Report) -> dict[tuple[str, str, str], int]:
    """Return how many calls an implementation refused for which reason."""
    from collections import Counter

    from tutti.accelerator.conformance import Verdict
    from tutti.accelerator.conformance.report import DEVICE

    return dict(
        Counter(
            (o.subject, o.implementation, o.detail)
            for o in report.of(Verdict.UNSUPPORTED)
            if o.subject != DEVICE
        )
    )


def tuning_tables(rows: list[Measured], output: Path) -> list[Any]:
    """Return the fastest implementation of every call, beside the others."""
    from rich.text import Text

    from tutti.units import seconds_text

    table = _table("operator", "shape", "dtype", "fastest", "time", "others", right=("time",))
    for row in rows:
        best, *others = row.ranked
        table.add_row(
            row.operator,
            " × ".join(map(str, row.shape)),
            row.dtype,
            best[0],
            seconds_text(best[1]),
            ", ".join(f"{name} {seconds / best[1]:.2f}×" for name, seconds in others),
        )
    foot = f"written to {output}; use it with TUTTI_CHOICES={output}"
    return [table, Text(foot, style="dim")]
