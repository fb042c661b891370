"""Where each rank's step went, by the second, in a store of its own: a sink of rank 0.

Writing a minute takes the longer the more ranks there are, so it is done beside the steps and at
most a fiftieth of the time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from tutti.errors import InputError
from tutti.observe.figures import key
from tutti.observe.packed_rows import Floats
from tutti.observe.record import RankTimes
from tutti.observe.store import SeriesStore

JOB = "job"  # whose series these are, where others have a host's name
FILE = "ranks.sqlite"
RANK_FIELDS = {  # figure → field of a rank's times
    "rank_step_seconds": "step_s",
    "rank_compute_seconds": "compute_s",
    "rank_communication_seconds": "communication_s",
    "rank_bubble_seconds": "bubble_s",
    "rank_copy_seconds": "copy_s",
    "rank_data_seconds": "data_s",
    "rank_other_seconds": "other_s",
    "rank_memory_peak_bytes": "peak_bytes",
}
_LEAST_S, _SHARE = 1.0, 0.02


def rank_names(num_ranks: int) -> tuple[str, ...]:
    """Return the keys of all ranks' figures, figure by figure."""
    return tuple(key(name, str(rank)) for name in RANK_FIELDS for rank in range(num_ranks))


class RankSeries:
    """Takes the times of all ranks; of several steps in a second the last stays."""

    def __init__(
        self, path: Path, num_ranks: int, *, say: Callable[[str], None] = lambda _: None
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._store, self._say = SeriesStore(path), say
        self._names = rank_names(num_ranks)
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._changed = self._works = True
        self._thread = threading.Thread(target=self._run, name="rank series", daemon=True)
        self._thread.start()

    def write(self, times: Sequence[RankTimes], *, at: float | None = None) -> None:
        """Take a step that ended `at`, seconds since 1970."""
        if not self._works:
            return
        row: Floats = np.array(
            [getattr(own, name) for name in RANK_FIELDS.values() for own in times], np.float32
        )
        with self._lock, self._failing():
            second = int(time.time() if at is None else at)
            self._store.append_row(JOB, second, self._names, row)
            self._changed = True

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Say once that the store fails, and end it; never the run."""
        try:
            yield
        except (InputError, OSError) as error:
            if self._works:
                self._say(f"figures of ranks are written no longer ({error})")
            self._works = False

    def _run(self) -> None:
        pause = _LEAST_S
        while not self._stop.wait(pause) and self._works:
            began = time.monotonic()
            with self._lock, self._failing():
                if self._changed:
                    self._store.flush(summaries=False)
                self._changed = False
            pause = max(_LEAST_S, (time.monotonic() - began) / _SHARE)

    def close(self) -> None:
        """Write what is left."""
        self._stop.set()
        self._thread.join()
        with self._lock, self._failing():
            self._store.close()
