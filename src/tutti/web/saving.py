"""One file of one view, or of all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlencode

from tutti.files import write_text
from tutti.web.page import saved_page
from tutti.web.watched import VIEWS, Document, Query, Watched


def key(view: str, run: int, query: Query) -> str:
    """Return the name of a document, which the script makes alike."""
    words = urlencode(sorted((k, v) for k, v in query.items() if v))
    return f"{view}/{run}" + (f"?{words}" if words else "")


def runs_document(runs: Sequence[Watched]) -> Document:
    """Return the list of runs."""
    return {"runs": [run.summary() for run in runs]}


def view_page(runs: Sequence[Watched], view: str, run: int, query: Query) -> str:
    """Return one view as a page that is complete in itself; "runs" is the list of all."""
    documents: Document = {"runs": runs_document(runs)}
    start = "#/runs"
    title = "runs"
    if view != "runs":
        name = key(view, run, query)
        documents[name] = runs[run].view(view, query)
        words = urlencode(sorted((k, v) for k, v in query.items() if v))
        start = f"#/run/{run}/{view}" + (f"?{words}" if words else "")
        title = f"{runs[run].name}: {view}"
    return saved_page(title, documents, start, time.time())


def save_all(runs: Sequence[Watched], path: Path) -> None:
    """Write every view of every run, as they are by default, into one file."""
    documents: Document = {"runs": runs_document(runs)}
    for index, run in enumerate(runs):
        for view in VIEWS:
            documents[key(view, index, {})] = run.view(view, {})
    start = "#/runs" if len(runs) > 1 else "#/run/0/run"
    title = ", ".join(run.name for run in runs)
    write_text(path, saved_page(title, documents, start, time.time()))
