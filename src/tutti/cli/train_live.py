"""A training run as it happens: a table in a terminal, lines elsewhere; on standard error."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tutti.ranks.events import event_text
from tutti.units import many

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

    from tutti.ranks.local_processes import RankEvent
    from tutti.train.run.planning import Job

LEAST_PAUSE_S = 1.0  # between lines, where there is no terminal
CURVE = 60  # losses shown as a line of blocks
_BLOCKS = "▁▂▃▄▅▆▇█"


def curve(losses: list[float], width: int = CURVE) -> str:
    """Return the last losses as a line of blocks, the highest a full one."""
    shown = losses[-width:]
    if len(shown) < 2:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((loss - low) * scale)] for loss in shown)


class LiveRun:
    """Shows a job's events."""

    def __init__(self, job: Job, *, wanted: bool = True) -> None:
        self._job, self._wanted = job, wanted
        self._losses: list[float] = []
        self._step: dict[str, Any] = {}
        self._said = "starting"
        self._validation = ""
        self._live: Live | None = None
        self._last_line = 0.0

    def __enter__(self) -> LiveRun:
        if self._wanted and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                console=Console(stderr=True), get_renderable=self._draw, refresh_per_second=4
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def hear(self, event: RankEvent) -> None:
        """Take an event of a rank."""
        values = dict(event.values)
        if event.rank != 0 and event.kind not in ("warning", "stranger"):
            return
        if event.kind == "step":
            self._step = values
            self._losses.append(float(values["loss"]))
            self._said = ""
        elif event.kind == "validation":
            self._validation = f"validation loss {values['loss']:.4f} at step {values['step']}"
        elif event.kind in ("say", "warning", "stranger"):
            self._said = str(values["text"])
        elif event.kind == "notice" and self._live is not None:  # stays, above what moves
            self._live.console.print(str(values["text"]), markup=False, highlight=False)
        if self._live is None and self._wanted:
            self._print(event.kind, values)

    def _print(self, kind: str, values: dict[str, Any]) -> None:
        text = event_text(kind, values)
        now = time.monotonic()
        last = kind == "step" and values["step"] == self._job.config.steps
        soon = kind == "step" and now - self._last_line < LEAST_PAUSE_S
        if not text or (soon and not last):
            return
        if kind == "step":
            self._last_line = now
        sys.stderr.write(text + "\n")

    # --- drawing ---------------------------------------------------------------------------

    def _draw(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        plan, total = self._job.plan, self._job.config.steps
        head = Text(
            f"{plan.model.name} on {plan.cluster.name}, {many(plan.num_ranks, 'chip')}", "bold"
        )
        if not self._step:
            return Group(head, Text(self._said))
        step, figures = int(self._step["step"]), self._step
        row = Table.grid(padding=(0, 2))
        row.add_row(
            ProgressBar(total=total, completed=step, width=30),
            f"step {step} of {total}",
            f"loss {figures['loss']:.4f}",
            f"{figures['tokens_per_s']:,.0f} tokens/s",
            f"MFU {figures['mfu']:.1%}",
            _measured(figures),
        )
        parts: list[RenderableType] = [head, row]
        if figures.get("pools"):
            parts.append(_pools(figures))
        parts.append(Text(f"loss {curve(self._losses)}", "cyan"))
        said = " · ".join(filter(None, (self._validation, self._said)))
        if said:
            parts.append(Text(said))
        return Group(*parts)


def _measured(figures: dict[str, Any]) -> str:
    text = f"{figures['seconds']:.3f} s"
    predicted = figures.get("predicted_s")
    return text if predicted is None else f"{text} (predicted {predicted:.3f})"


def _pools(figures: dict[str, Any]) -> RenderableType:
    from rich.table import Table

    from tutti.units import bytes_text

    table = Table(box=None, pad_edge=False)
    for name in ("pool", "chips", "compute", "communication", "bubble", "data", "memory"):
        table.add_column(name, justify="left" if name == "pool" else "right")
    whole = float(figures["seconds"])
    for pool, times in figures["pools"].items():
        shares = [f"{times[n] / whole:.0%}" for n in ("compute_s", "communication_s", "bubble_s")]
        table.add_row(
            pool,
            str(times["ranks"]),
            *shares,
            f"{times['data_s'] / whole:.0%}",
            bytes_text(times["peak_bytes"]),
        )
    return table
