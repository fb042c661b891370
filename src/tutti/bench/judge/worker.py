"""One drawn question in a process of its own.

    python -m tutti.bench.judge.worker 7 30        prints the row of question 7 as JSON

The row says how much single changes gain within so many CPU seconds, how the answer changes with
the question's form, whether more makes it worse, and whether anything beats the bound.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from tutti.bench.judge.questions import DrawnQuestion, draw
from tutti.bench.judge.single_changes import CPU_SECONDS, Judge
from tutti.bench.judge.variants import forms, more, narrow
from tutti.errors import TuttiError
from tutti.hardware.cluster import Cluster
from tutti.search.answer.result import SearchResult
from tutti.search.ask_from_values import Limits, make_problem
from tutti.search.planner import plan
from tutti.search.question.space import Problem

Row = dict[str, Any]
BOUND_SLACK = 1e-9  # relative: what rounding makes of one number


def judged(question: DrawnQuestion, cpu_seconds: float = CPU_SECONDS) -> Row:
    """Return the row of one question."""
    problem = problem_of(question)
    try:
        result = plan(problem, compare=False)
    except TuttiError as error:
        return {"question": question.number, "title": question.title, "why": str(error)}
    row = answer_row(question, result)
    row |= changes_of(question, problem, result, cpu_seconds)
    row["forms_pct"] = dict(_forms(question, result))
    row["more_pct"] = dict(_more(question, result))
    return row


def answer_row(question: DrawnQuestion, result: SearchResult) -> Row:
    """Return what the planner answers."""
    return {
        "question": question.number,
        "title": question.title,
        "step_s": result.best.step_seconds,
        "bound_s": result.lower_bound_seconds,
        "gap_pct": result.gap_pct,
        "search_cpu_s": result.search_cpu_seconds,
        "summary": result.best.summary,
        "work": dict(result.work),
    }


def problem_of(
    question: DrawnQuestion, cluster: Cluster | None = None, limits: Limits | None = None
) -> Problem:
    """Return the question as the planner takes it, of another cluster or space where given."""
    return make_problem(
        question.model,
        cluster or question.cluster,
        sequence_length=question.sequence_length,
        global_batch=question.global_batch,
        limits=limits,
    )


def changes_of(
    question: DrawnQuestion, problem: Problem, result: SearchResult, cpu_seconds: float
) -> Row:
    """Return what single changes gain within so many CPU seconds."""
    judge = Judge(question.model, question.cluster, problem.pinned_sources())
    improved = judge.improve(result.best.plan, seed=question.number, cpu_seconds=cpu_seconds)
    return {
        "gain_pct": improved.gain_pct,
        "changes": [{"kind": k, "what": w, "gain_pct": g} for k, w, g in improved.path],
        "tried": improved.tried,
        "exhausted": improved.exhausted,
        "below_bound": improved.after_s < result.lower_bound_seconds * (1.0 - BOUND_SLACK),
    }


def seconds(problem: Problem) -> float | None:
    """Return the step that the planner finds; None where it finds none."""
    try:
        return plan(problem, compare=False).best.step_seconds
    except TuttiError:
        return None


def _forms(question: DrawnQuestion, result: SearchResult) -> Iterator[tuple[str, float | None]]:
    """Yield by how many percent another form of the question changes the step."""
    for name, cluster in forms(question):
        step_s = seconds(problem_of(question, cluster))
        yield name, None if step_s is None else _percent(step_s, result.best.step_seconds)


def _more(question: DrawnQuestion, result: SearchResult) -> Iterator[tuple[str, float | None]]:
    """Yield by how many percent the step is longer with more; None: no plan was found any more."""
    for name, cluster in more(question):
        step_s = seconds(problem_of(question, cluster))
        yield name, None if step_s is None else _percent(step_s, result.best.step_seconds)
    name, limits = narrow(question)
    step_s = seconds(problem_of(question, limits=limits))
    if step_s is not None:
        yield f"wider than {name}", _percent(result.best.step_seconds, step_s)


def _percent(seconds: float, than: float) -> float:
    return 100.0 * (seconds / than - 1.0)


def main(arguments: list[str]) -> None:
    """Print the row of the question that the arguments name."""
    from tutti.bench.plan_worker import warm_up

    warm_up()
    row = judged(draw(int(arguments[0])), float(arguments[1]))
    sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
