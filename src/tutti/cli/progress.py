"""One line for people who wait: what a search does, its best plan so far, the proven gap."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.status import Status

    from tutti.search.effort import Progress


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
    from tutti.search.explanation import step_text

    parts = [progress.doing]
    best, bound = progress.best_seconds, progress.lower_bound_seconds
    if best is not None:
        parts.append(f"best {step_text(best)}")
        if bound:
            parts.append(f"at most {100 * (best / bound - 1):.1f} % from the best possible")
    elif bound:
        parts.append(f"no plan below {step_text(bound)}")
    if progress.settled:
        parts.append(f"{progress.settled} simulated")
    return " · ".join(parts)
