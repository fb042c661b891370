"""Many steps at once, where all of them are the same decodes: for whoever simulates.

While nobody can be admitted, nobody ends and pages reach, a scheduler's next steps have the same
rows, each with one token more. `leap` leaves it as if their tokens had come, step after step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tutti.batching.scheduler import Scheduler
from tutti.batching.slots import STAYS


class Ahead(NamedTuple):
    """Steps that are alike: how many at most, their rows, and the keys that the first reads."""

    steps: int
    rows: int
    keys: int


NOTHING = Ahead(0, 0, 0)


def ahead(scheduler: Scheduler) -> Ahead:
    """Return the steps of decodes alone that come next whatever their tokens are."""
    settings, columns = scheduler.settings, scheduler.slots
    if (
        scheduler.num_in_flight
        or scheduler.on_host.is_due
        or settings.prefix
        or settings.window is not None
        or settings.stretch is not None
    ):
        return NOTHING
    used = (columns.sequence >= 0).nonzero()[0]
    if not len(used) or len(used) > settings.most_tokens or _admits(scheduler, used):
        return NOTHING
    length, computed = columns.length[used], columns.computed[used]
    alike = (columns.leaving[used] == STAYS) & (columns.known[used] == length)
    if not (alike & (length - computed == 1)).all():
        return NOTHING
    steps = int((columns.limit[used] - length).min()) - 1
    steps = min(steps, _steps_of_pages(scheduler, used, computed, steps))
    return Ahead(steps, len(used), int(computed.sum()) + len(used)) if steps > 0 else NOTHING


def _admits(scheduler: Scheduler, used: np.ndarray) -> bool:
    """Tell whether somebody who waits may get a slot before one is left."""
    if not scheduler.waiting:
        return False
    last = float(scheduler.slots.order[used].max())
    return scheduler.slots.num_free > 0 or scheduler.waiting[0].order < last


def _steps_of_pages(
    scheduler: Scheduler, used: np.ndarray, computed: np.ndarray, steps: int
) -> int:
    """Return for how many steps pages reach, within a page's tokens."""
    size, held = scheduler.settings.page_size, scheduler.slots.num_pages[used]
    free = scheduler.pool.available
    while steps > 0 and int((-(-(computed + steps) // size) - held).clip(0).sum()) > free:
        steps = max(0, steps - size) if steps > size else steps // 2
    return steps


def leap(scheduler: Scheduler, steps: int, token: int) -> int:
    """Let so many of the steps `ahead` be over, each with the same token; return their rows."""
    columns, size = scheduler.slots, scheduler.settings.page_size
    used = (columns.sequence >= 0).nonzero()[0]
    for slot in used.tolist():
        known, held = int(columns.known[slot]), int(columns.num_pages[slot])
        columns.history[slot, known : known + steps] = token
        new = -(-(int(columns.computed[slot]) + steps) // size) - held
        if new > 0:
            columns.table[slot, held : held + new] = scheduler.pool.take(new)
            columns.num_pages[slot] += new
    for column in (columns.known, columns.length, columns.computed):
        column[used] += steps
    columns.stored[used] = columns.computed[used]
    scheduler.skip(steps)
    return len(used)
