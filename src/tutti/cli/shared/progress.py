"""What people who wait see, on standard error: a line for searches, bars for work of known size."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.status import Status

    from tutti.search.question.effort import Progress


class ProgressLine:
    """A spinner on standard error; silent where that is no terminal."""

    def __init__(self, title: str, *, wanted: bool = True) -> None:
        self.title = title
        self._status: Status | None = None
        if wanted and sys.stderr.isatty():
            from rich.console import Console

            self._status = Console(stderr=True).status(title)

    def __enter__(self) -> ProgressLine:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, text: str) -> None:
        """Show what is being done, in words."""
        if self._status is not None:
            self._status.update(f"{self.title}: {text}")

    def __call__(self, progress: Progress) -> None:
        """Show where the search is."""
        if self._status is not None:
            self._status.update(f"{self.title}: {progress_text(progress)}")


def progress_text(progress: Progress) -> str:
    """Return "simulating · best 71.98 s · at most 4.5 % from the best possible · 12 simulated"."""
    from tutti.search.answer.explanation import step_text

    parts = [progress.doing]
    best, bound = progress.best_seconds, progress.lower_bound_seconds
    if best is not None:
        parts.append(f"best {step_text(best)}")
        if bound:
            parts.append(f"at most {100 * (best / bound - 1):.1f} % from the best possible")
    elif bound:
        parts.append(f"no plan below {step_text(bound)}")
    if progress.simulated:
        parts.append(f"{progress.simulated} simulated")
    return " · ".join(parts)


Update = Callable[[str, float, float], None]  # what is being done, how much of it, of how much


@contextmanager
def progress_bar(
    unit: Literal["count", "bytes", "seconds"], doing: str = "", *, wanted: bool = True
) -> Iterator[Update]:
    """Show a bar while something is done; silent where standard error is no terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    said, bar = TextColumn("{task.description}"), BarColumn()
    columns = {
        "count": (bar, TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn(), said),
        "bytes": (bar, DownloadColumn(binary_units=True), TransferSpeedColumn(),
                  TimeRemainingColumn(), said),
        "seconds": (bar, TextColumn("{task.completed:.0f} of {task.total:.0f} s"),
                    TimeRemainingColumn(), said),
    }[unit]  # fmt: skip
    console = Console(stderr=True)
    hidden = not wanted or not console.is_terminal
    with Progress(
        TextColumn(doing), *columns, console=console, transient=True, disable=hidden
    ) as shown:
        task = shown.add_task("", total=1 if unit == "seconds" else None)
        yield lambda what, done, whole: shown.update(
            task, description=what, completed=done, total=whole
        )
