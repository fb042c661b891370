"""The conformance kit: what a chip must do before a model trusts it.

`cases` states calls of every operator as data; `run` holds each registered implementation against
the reference in float64 on the host, within `tolerance`; `device` checks memory, streams, random
numbers, copies and graphs, `collectives` the backend. `report` is the answer, for people and for
machines. A vendor runs it with `tutti accelerator check`.
"""

from tutti.accelerator.conformance.report import Outcome, Report, Verdict
from tutti.accelerator.conformance.run import check

__all__ = ["Outcome", "Report", "Verdict", "check"]
