"""Many steps at once, where all of them are alike: for whoever simulates.

While nobody can be admitted, nobody ends and pages reach, a scheduler's next steps have the same
rows, each with one token more; beside them a prompt may be under way that takes all tokens that are
left of every step. `leap` leaves the scheduler as if their tokens had come, step after step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from tutti.batching.scheduler import Scheduler
from tutti.batching.slots import STAYS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ahead:
    """Steps that are alike: how many at most, and what the first has."""

    steps: int = 0
    keys: int = 0  # that its decodes read
    decodes: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # their slots
    prompt: int = -1  # a slot
    start: int = 0  # of the prompt's chunk
    chunk: int = 0  # tokens of the prompt in each step

    @property
    def rows(self) -> int:
        """Decodes of each step."""
        return len(self.decodes)


NOTHING = Ahead()


def ahead(scheduler: Scheduler, *, prompts: bool = False) -> Ahead:
    """Return the steps that come next whatever their tokens are; `prompts`: with chunks of one."""
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
    if not len(used) or (columns.leaving[used] != STAYS).any() or _gives_way(scheduler, used):
        return NOTHING
    length, computed = columns.length[used], columns.computed[used]
    to_do = np.minimum(length, columns.goal[used]) - computed
    single = to_do == 1
    known = columns.known[used]
    # a token came already: the first one is told of
    if not single.any() or not ((known == length) & (known > columns.prompt[used]))[single].all():
        return NOTHING
    decodes, room = used[single], settings.most_tokens - int(np.count_nonzero(single))
    steps = int((columns.limit[decodes] - columns.length[decodes]).min()) - 1
    keys = int(computed[single].sum()) + len(decodes)
    if len(decodes) == len(used):
        if room < 0 or scheduler.admits_next():
            return NOTHING
        several = Ahead(steps=steps, keys=keys, decodes=decodes)
    else:
        if not prompts or room <= 0 or settings.target_s is not None or (to_do <= 0).any():
            return NOTHING
        first = int(columns.by_order(used[~single])[0])
        start = int(columns.computed[first])
        left = min(int(columns.length[first]), int(columns.goal[first])) - start
        steps = min(steps, (left - 1) // room)
        several = Ahead(
            steps=steps, keys=keys, decodes=decodes, prompt=first, start=start, chunk=room
        )
    steps = _steps_of_pages(scheduler, several)
    if steps <= 0:
        return NOTHING
    return several if steps == several.steps else replace(several, steps=steps)


def _gives_way(scheduler: Scheduler, used: np.ndarray) -> bool:
    """Tell whether somebody who waits may take the place of one who has a slot."""
    if not scheduler.waiting:
        return False
    return scheduler.waiting[0].order < float(scheduler.slots.order[used].max())


def _steps_of_pages(scheduler: Scheduler, several: Ahead) -> int:
    """Return for how many steps pages reach, within a page's tokens."""
    columns, size, steps = scheduler.slots, scheduler.settings.page_size, several.steps
    computed, held = columns.computed[several.decodes], columns.num_pages[several.decodes]
    free = scheduler.pool.available
    while steps > 0:
        need = int((-(-(computed + steps) // size) - held).clip(0).sum())
        if several.chunk:
            whole = several.start + steps * several.chunk
            need += max(0, -(-whole // size) - int(columns.num_pages[several.prompt]))
        if need <= free:
            break
        steps = steps - size if steps > size else steps // 2
    return steps


def leap(scheduler: Scheduler, several: Ahead, steps: int, token: int) -> None:
    """Let so many of the steps `ahead` be over, each with the same token."""
    columns, size = scheduler.slots, scheduler.settings.page_size
    for slot in several.decodes.tolist():
        known = int(columns.known[slot])
        columns.history[slot, known : known + steps] = token
    for column in (columns.known, columns.length, columns.computed):
        column[several.decodes] += steps
    own = several.decodes
    if several.chunk:
        own = np.append(own, several.prompt)
        columns.computed[several.prompt] += steps * several.chunk
    columns.stored[own] = columns.computed[own]
    wanted = -(-columns.computed[own] // size) - columns.num_pages[own]
    for place in (wanted > 0).nonzero()[0].tolist():
        slot, new = int(own[place]), int(wanted[place])
        held = int(columns.num_pages[slot])
        columns.table[slot, held : held + new] = scheduler.pool.take(new)
        columns.num_pages[slot] += new
    scheduler.skip(steps)
