"""`tutti bench plan --drawn N`: the planner on questions that nobody chose, judged one by one.

Each question runs in a process of its own. With a file to write to, every row is written when it is
there, and questions whose rows the file has are not asked again.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tutti.bench.judge.verdict import Verdict, verdict_of
from tutti.cli.shared.output import print_json, print_rich
from tutti.cli.shared.progress import progress_bar
from tutti.errors import InputError
from tutti.files import pretty_json, read_file, write_text

if TYPE_CHECKING:
    from rich.table import Table

Row = dict[str, Any]


def judge_drawn(
    count: int, only: int | None, cpu_seconds: float, output: Path | None, *, as_json: bool
) -> None:
    """Judge the first `count` drawn questions, or one of them, and print what they say."""
    if count < 1:
        raise InputError(f"--drawn: {count} is too small; give 1 or more")
    if only is not None and not 0 <= only < count:
        raise InputError(f"--only: no question {only}; they are 0 to {count - 1}")
    if cpu_seconds < 0:
        raise InputError(f"--cpu-seconds: {cpu_seconds:g} is too small; give 0 or more")
    known = _known(output, cpu_seconds)
    numbers = range(count) if only is None else (only,)
    rows: list[Row] = []
    with progress_bar("count", "judging", wanted=not as_json) as update:
        for done, number in enumerate(numbers):
            update(f"question {number}", done, len(numbers))
            if number not in known:
                known[number] = in_its_own_process(number, cpu_seconds)
                _write(output, known, cpu_seconds)
            rows.append(known[number])
    verdict = verdict_of(rows)
    if as_json:
        print_json({"rows": rows, "verdict": _plain(verdict)})
        return
    print_rich(drawn_table(rows))
    for row in rows:
        if "why" in row:
            typer.echo(f"{row['question']}: {row['title']}: {row['why']}")
    for line in verdict.lines():
        typer.echo(line)
    if output is not None:
        typer.echo(f"written to {output}")


def _plain(verdict: Verdict) -> dict[str, object]:
    """Return a verdict as plain values; what is endless has no number."""
    return {
        name: None if isinstance(value, float) and math.isinf(value) else value
        for name, value in (asdict(verdict) | {"passes": verdict.passes}).items()
    }


def _known(output: Path | None, cpu_seconds: float) -> dict[int, Row]:
    """Return the rows that a file has, by question."""
    if output is None or not output.exists():
        return {}
    document = read_file(output)
    if not isinstance(document, dict) or document.get("cpu_seconds") != cpu_seconds:
        raise InputError(
            f"{output}: holds no rows of {cpu_seconds:g} CPU seconds each; name another file, or "
            "give --cpu-seconds as it was"
        )
    return {row["question"]: row for row in document["rows"]}


def _write(output: Path | None, known: dict[int, Row], cpu_seconds: float) -> None:
    if output is not None:
        rows = [known[number] for number in sorted(known)]
        write_text(output, pretty_json({"cpu_seconds": cpu_seconds, "rows": rows}) + "\n")


def in_its_own_process(number: int, cpu_seconds: float) -> Row:
    """Return the row of a question."""
    command = [sys.executable, "-m", "tutti.bench.judge.worker", str(number), str(cpu_seconds)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        why = f"ended with code {done.returncode} ({last})"
        return {"question": number, "title": "", "why": why}
    row: Row = json.loads(done.stdout)
    return row


def drawn_table(rows: Sequence[Row]) -> Table:
    """Return one line for each question that has a plan."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", justify="right")
    table.add_column("question")
    for name in ("CPU", "step", "gap", "changes gain", "by", "form", "more"):
        table.add_column(name, justify="right", no_wrap=name != "by")
    for row in rows:
        if "why" not in row:
            table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> list[str]:
    kinds = dict.fromkeys(change["kind"] for change in row["changes"])
    return [
        str(row["question"]),
        row["title"],
        f"{row['search_cpu_s']:.1f} s",
        f"{row['step_s']:.4g} s",
        f"{row['gap_pct']:.1f} %",
        f"{row['gain_pct']:.2f} %" + ("" if row["exhausted"] else " +"),
        ", ".join(kinds),
        _worst(row["forms_pct"], both_ways=True),
        _worst(row["more_pct"], both_ways=False),
    ]


def _worst(changes: dict[str, float | None], *, both_ways: bool) -> str:
    """Return the largest change and what made it."""
    if not changes:
        return "–"
    if lost := [name for name, change in changes.items() if change is None]:
        return f"no plan ({lost[0]})"

    def size(name: str) -> float:
        change = changes[name] or 0.0
        return abs(change) if both_ways else change

    name = max(changes, key=size)
    return f"{changes[name]:+.2f} %" + (f" ({name})" if size(name) > 0.005 else "")
