"""Judge the planner on drawn questions, many at a time: for machines with many cores.

python benchmarks/judge_questions.py ask rows.jsonl --first 10001 --count 40 --processes 12
python benchmarks/judge_questions.py tell rows.jsonl

The questions and changes of `tutti bench plan --drawn`, in parts: what single changes gain on
a question, and each other form of it or larger one, is a row of its own, written when it is
there. `ask` ends when its minutes are over and goes on where a file has rows; the changes of all
questions come first; `--without-forms` leaves other forms out. `tell` puts the parts together and
prints the verdict; parts that are missing count for nothing and are said.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tutti.bench.judge import worker
from tutti.bench.judge.questions import DrawnQuestion, draw
from tutti.bench.judge.variants import forms, more, narrow
from tutti.bench.judge.verdict import verdict_of
from tutti.bench.plan_worker import warm_up
from tutti.errors import TuttiError
from tutti.search.planner import plan

Row = dict[str, Any]
Part = tuple[int, str]
CHANGES, NARROW = "changes", "narrow"


def parts_of(number: int, *, with_forms: bool = True) -> Iterator[Part]:
    """Yield the parts of a question besides its changes."""
    question = draw(number)
    for name, _ in (*(forms(question) if with_forms else ()), *more(question)):
        yield number, name
    yield number, NARROW


def part_row(part: Part, cpu_seconds: float) -> Row:
    """Return the row of a part: of the changes all that is said, else the seconds of a step."""
    number, name = part
    question, began = draw(number), time.process_time()
    row: Row = {"question": number, "part": name}
    if name == CHANGES:
        row |= changes_row(question, cpu_seconds)
    elif name == NARROW:
        called, limits = narrow(question)
        row |= {
            "narrow": called,
            "seconds": worker.seconds(worker.problem_of(question, limits=limits)),
        }
    else:
        cluster = dict((*forms(question), *more(question)))[name]
        row["seconds"] = worker.seconds(worker.problem_of(question, cluster))
    return row | {"cpu_s": time.process_time() - began}


def changes_row(question: DrawnQuestion, cpu_seconds: float) -> Row:
    """Return what the planner answers, and what single changes gain."""
    problem = worker.problem_of(question)
    try:
        result = plan(problem, compare=False)
    except TuttiError as error:
        return {"title": question.title, "why": str(error)}
    return worker.answer_row(question, result) | worker.changes_of(
        question, problem, result, cpu_seconds
    )


def ask(given: argparse.Namespace) -> None:
    """Ask the parts that the file has not, until the minutes are over."""
    ends = time.monotonic() + 60.0 * given.minutes
    numbers = range(given.first, given.first + given.count)
    wanted: list[Part] = [(number, CHANGES) for number in numbers]
    if not given.changes_only:
        with_forms = not given.without_forms
        wanted += [part for number in numbers for part in parts_of(number, with_forms=with_forms)]
    known = {(row["question"], row["part"]) for row in read_rows(given.file)}
    wanted = [part for part in wanted if part not in known]
    warm_up()  # what is compiled now, no process compiles
    running: dict[Any, tuple[Part, Any]] = {}
    context = multiprocessing.get_context("fork")
    with given.file.open("a", encoding="utf-8") as rows:
        while (wanted or running) and time.monotonic() < ends:
            while wanted and len(running) < given.processes:
                receiving, sending = context.Pipe(duplex=False)
                part = wanted.pop(0)
                process = context.Process(target=_send, args=(sending, part, given.cpu_seconds))
                process.start()
                sending.close()
                running[receiving] = (part, process)
            for ready in multiprocessing.connection.wait(list(running), timeout=1.0):
                part, process = running.pop(ready)
                row = _received(ready, part)
                process.join()
                rows.write(json.dumps(row) + "\n")
                rows.flush()
        for _, process in running.values():
            process.kill()
            process.join()
    print(f"{len(running) + len(wanted)} of {len(wanted) + len(running) + len(known)} left")


def _send(sending: Any, part: Part, cpu_seconds: float) -> None:
    sending.send(part_row(part, cpu_seconds))


def _received(receiving: Any, part: Part) -> Row:
    try:
        row: Row = receiving.recv()
    except EOFError:
        return {"question": part[0], "part": part[1], "why": "its process died"}
    return row


def read_rows(file: Path) -> list[Row]:
    """Return the rows of a file; none where there is no file."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def whole_rows(rows: list[Row]) -> tuple[list[Row], int]:
    """Return one row for each question whose changes are there, and how many parts are missing."""
    parts: dict[int, dict[str, Row]] = {}
    for row in rows:
        parts.setdefault(row["question"], {})[row["part"]] = row
    whole, missing = [], 0
    for number, of in sorted(parts.items()):
        if CHANGES not in of:
            continue
        row = of[CHANGES] | {"forms_pct": {}, "more_pct": {}}
        whole.append(row)
        if "why" in row:
            continue
        form_names = [name for name, _ in forms(draw(number))]
        for _, name in parts_of(number):
            if name not in of:
                missing += 1
                continue
            seconds = of[name].get("seconds")
            percent = None if seconds is None else 100.0 * (seconds / row["step_s"] - 1.0)
            if name == NARROW:
                if seconds is not None:
                    wider = 100.0 * (row["step_s"] / seconds - 1.0)
                    row["more_pct"][f"wider than {of[name]['narrow']}"] = wider
            else:
                row["forms_pct" if name in form_names else "more_pct"][name] = percent
    return whole, missing


def tell(file: Path) -> None:
    """Print a line for each question, and the verdict."""
    whole, missing = whole_rows(read_rows(file))
    for row in whole:
        if "why" in row:
            print(f"{row['question']} {row.get('title', '')}: {row['why']}")
            continue
        changes = ", ".join(f"{c['kind']} {c['gain_pct']:.2f}" for c in row["changes"])
        others = ", ".join(
            f"{name} {'none' if value is None else f'{value:+.2f}'}"
            for name, value in (row["forms_pct"] | row["more_pct"]).items()
        )
        print(
            f"{row['question']} {row['title']}: {row['step_s']:.4g} s, gap {row['gap_pct']:.1f} %, "
            f"search {row['search_cpu_s']:.1f} s; "
            f"gain {row['gain_pct']:.2f} % by [{changes}]; {others}"
        )
    for line in verdict_of(whole).lines():
        print(line)
    print(f"{len(whole)} questions, {missing} parts not asked")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("ask", "tell"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--first", type=int, default=10001)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--cpu-seconds", type=float, default=30.0)
    parser.add_argument("--changes-only", action="store_true")
    parser.add_argument("--without-forms", action="store_true")
    given = parser.parse_args()
    if given.what == "ask":
        ask(given)
    else:
        tell(given.file)


if __name__ == "__main__":
    main()
