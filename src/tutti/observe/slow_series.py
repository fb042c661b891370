"""The chips and wires of a job that are slow, step by step, in a store of its own.

There is no file until something is slow: rules, the dashboard and the doctor read it as they read
what hosts keep. Who decides what is slow is `diagnose`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tutti.errors import InputError
from tutti.observe.figures import key
from tutti.observe.rank_series import JOB
from tutti.observe.store import SeriesStore

FILE = "slow.sqlite"
_FLUSH_S = 1.0


class SlowSeries:
    """Takes what is slow after every step; trouble is said once and ends it, never the run."""

    def __init__(self, path: Path, *, say: Callable[[str], None] = lambda _: None) -> None:
        self._path, self._say = path, say
        self._store: SeriesStore | None = None
        self._known: set[str] = set()  # keys of all that ever was slow
        self._flushed = 0.0
        self._works = True

    def write(
        self,
        chips: Mapping[str, float],
        wires: Mapping[tuple[str, ...], float],
        *,
        at: float | None = None,
    ) -> None:
        """Take a step that ended `at`, seconds since 1970."""
        now = {key("slow_chip_ratio", chip): factor for chip, factor in chips.items()}
        now |= {key("slow_wire_ratio", " – ".join(e)): factor for e, factor in wires.items()}
        self._known |= set(now)
        if not self._known or not self._works:
            return
        values = dict.fromkeys(sorted(self._known), 1.0) | now
        try:
            if self._store is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._store = SeriesStore(self._path)
            self._store.append(JOB, int(time.time() if at is None else at), values)
            if time.monotonic() - self._flushed >= _FLUSH_S:
                self._store.flush(summaries=False)
                self._flushed = time.monotonic()
        except (InputError, OSError) as error:
            self._say(f"what is slow is written no longer ({error})")
            self._works = False

    def close(self) -> None:
        """Write what is left."""
        if self._store is None:
            return
        try:
            self._store.close()
        except (InputError, OSError) as error:
            self._say(f"what was slow is not all written ({error})")
