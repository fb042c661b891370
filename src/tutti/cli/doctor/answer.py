"""A finding as a person reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from tutti.cli.shared.output import print_json, print_rich

if TYPE_CHECKING:
    from tutti.diagnose.finding import Finding


def print_finding(finding: Finding, *, json: bool) -> None:
    """Print a finding, and end with its exit code."""
    if json:
        print_json(finding.to_document())
    else:
        _print(finding)
    raise typer.Exit(finding.exit_code)


def _print(finding: Finding) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(finding):
        table.add_row(Text(name, style="bold"), Text(value))
    print_rich(table)
    if finding.evidence:
        print_rich(Text("evidence", style="bold"))
    for one in finding.evidence:
        place = f"{one.file}:{one.line}" if one.line else one.file
        who = "".join([f" · rank {one.rank}" if one.rank is not None else "",
                       f" · {one.host}" if one.host else ""])  # fmt: skip
        print_rich(Text(f"  {place}{who}", style="cyan"), Text(f"    {_printable(one.text)}"))


def _rows(finding: Finding) -> list[tuple[str, str]]:
    rows = [("component", "healthy" if finding.healthy else finding.component.value)]
    rows.append(("cause", finding.cause))
    if words := finding.where.words():
        rows.append(("where", words))
    if finding.confidence:
        rows.append(("confidence", f"{finding.confidence:.0%}"))
    if finding.remedy:
        rows.append(("remedy", finding.remedy))
    rows += [
        ("or", f"{one.component.value}: {one.cause} ({one.confidence:.0%})")
        for one in finding.alternatives
    ]
    rows += [("next", step) for step in finding.next_steps]
    rows += [("note", note) for note in finding.notes]
    return [(name, _printable(value)) for name, value in rows]


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)
