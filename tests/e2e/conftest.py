"""What end-to-end tests have in common."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tutti.search import planner
from tutti.search.answer.result import SearchResult
from tutti.search.question.effort import Effort
from tutti.search.question.space import Problem


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which commands are typed."""
    monkeypatch.chdir(tmp_path)
    for name in ("TUTTI_DEBUG", "TUTTI_DEVICE", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    from tests.support.train_job import write_job

    return write_job(tmp_path)


@pytest.fixture(autouse=True)
def short_last_mile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search with a tenth of the last mile: commands print the same of plans a little slower.

    What the last per cent takes is asked in tests/unit/search.
    """
    monkeypatch.setattr(planner, "Effort", partial(Effort, last_mile=250_000))


_ANSWERED: list[tuple[Problem, SearchResult]] = []


@pytest.fixture
def one_search_per_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search the same question once in a session: pages show readers the same first one."""
    search = planner.plan

    def plan(problem: Problem, **options: Any) -> SearchResult:
        if options.keys() != {"report"}:
            return search(problem, **options)
        for asked, answer in _ANSWERED:
            if asked == problem:
                return answer
        _ANSWERED.append((problem, search(problem, **options)))
        return _ANSWERED[-1][1]

    monkeypatch.setattr(planner, "plan", plan)
