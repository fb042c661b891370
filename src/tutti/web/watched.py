"""What the dashboard can watch, and the documents that its views are drawn from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tutti.diagnose.finding import Finding

Document = dict[str, Any]
Query = Mapping[str, str]
VIEWS = ("run", "map", "heat", "step", "alerts", "doctor", "logs")
SPANS = (300, 1800, 7200, 86_400)  # seconds that a heat map may show


class Watched(Protocol):
    """A run, from wherever its figures come."""

    name: str

    def summary(self) -> Document:
        """Return what stands in the list of runs, with thinned curves."""
        ...

    def stamp(self, name: str) -> object:
        """Return what differs once a view has changed; None where only the view itself says so."""
        ...

    def view(self, name: str, query: Query) -> Document:
        """Return the document of a view; with `after`, a heat map's columns since then."""
        ...


def missing(why: str) -> Document:
    """Return the document of a view that there is nothing to draw of."""
    return {"missing": why}


def finding_document(finding: Finding) -> Document:
    """Return the document of the doctor's answer."""
    return {"finding": finding.to_document(), "where": finding.where.words()}


def whole_number(query: Query, name: str, default: int) -> int:
    """Return a number of an address; what is none counts as the default."""
    text = query.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 16 else default


def span_of(query: Query) -> int:
    """Return the seconds that a heat map shows: one of SPANS."""
    asked = whole_number(query, "span", SPANS[0])
    return min(SPANS, key=lambda known: abs(known - asked))


class Kept:
    """Answers that are costly, made again only when something they stand on has changed."""

    def __init__(self, most: int = 8) -> None:
        self._found: dict[str, tuple[object, Document]] = {}
        self._most = most

    def get(self, name: str, stamp: object, make: Callable[[], Document]) -> Document:
        """Return an answer; `stamp` is what it stands on."""
        known = self._found.get(name)
        if known is None or known[0] != stamp:
            self._found.pop(name, None)
            while len(self._found) >= self._most:
                self._found.pop(next(iter(self._found)))
            known = self._found[name] = (stamp, make())
        return known[1]
