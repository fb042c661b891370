"""The line for people who wait."""

from __future__ import annotations

from tutti.cli.shared.progress import ProgressLine, progress_text
from tutti.search.question.effort import Progress


def test_the_line_says_best_and_gap():
    assert progress_text(Progress(doing="bounding")) == "bounding"
    early = Progress(doing="predicting", lower_bound_seconds=2.0)
    assert progress_text(early) == "predicting · no plan below 2 s"
    late = Progress(doing="simulating", best_seconds=2.1, lower_bound_seconds=2.0, simulated=7)
    said = "simulating · best 2.1 s · at most 5.0 % from the best possible · 7 simulated"
    assert progress_text(late) == said


def test_silent_where_there_is_no_terminal(capsys):
    with ProgressLine("planning") as line:
        line(Progress(doing="bounding"))
    assert capsys.readouterr() == ("", "")
