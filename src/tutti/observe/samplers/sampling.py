"""The figures of this host, once a second, into the run's store: a thread beside the first rank.

While a burst is asked for, ten times a second into a file beside it, too.
"""

from __future__ import annotations

import contextlib
import math
import platform
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tutti.errors import InputError
from tutti.observe.samplers.bursts import EVERY_S, Burst, request_in
from tutti.observe.samplers.sampler import Closing, Sampler, Values
from tutti.observe.samplers.this_host import host_samplers
from tutti.observe.store import SeriesStore

Say = Callable[[str], None]
_FLUSH_S = 1.0  # what a kill may lose, and by how much a reader is behind
_SUMMARIES = 60  # flushes after which the longer values are written, too


class Rates:
    """Turns what only grows into its growth per second."""

    def __init__(self) -> None:
        self._before: Values = {}
        self._at = 0.0

    def of(self, values: Values, now: float) -> Values:
        """Return gauges as they are, and counters as rates.

        A counter has no rate, but not a number, at its first sample and where it was set back.
        """
        rates: Values = {}
        for name, value in values.items():
            if "_total" not in name:
                rates[name] = value
            else:
                grown = value - self._before.get(name, math.inf)
                known = grown >= 0 and now > self._at
                rates[name] = grown / (now - self._at) if known else math.nan
        self._before = {n: v for n, v in values.items() if "_total" in n}
        self._at = now
        return rates


class HostSampling:
    """Samples this host until it is closed; trouble is said once and ends it, never the run."""

    def __init__(
        self,
        path: Path,
        *,
        say: Say = lambda _: None,
        samplers: Sequence[Sampler] | None = None,
        further: Sequence[Sampler] = (),
        folders: Sequence[Path] = (),
        every_s: float = 1.0,
    ) -> None:
        """Sample into a store at `path`.

        `samplers` are all there are, or those of this host with `further` ones; `folders` are those
        whose file systems matter. What the host has no figures of is in `lacks`, once.
        """
        self.lacks: list[str] = []
        self._say, self._every = say, every_s
        self._stop = threading.Event()
        self._burst: Burst | None = None
        self._quick = Rates()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        asked = request_in(path.parent)
        self._answered = "" if asked is None else asked.name  # of a process before this one
        self._store = SeriesStore(path)
        own = host_samplers(self.lacks.append, folders, path.stem) if samplers is None else samplers
        self._samplers = [*own, *further]
        self._thread = threading.Thread(target=self._run, name="sampling", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        rates, host, flushed = Rates(), platform.node(), time.monotonic()
        flushes = 0
        try:
            while True:
                now = time.time()
                values: Values = {}
                for sampler in self._samplers:
                    values |= sampler.sample()
                self._store.append(host, int(now), rates.of(values, time.monotonic()))
                if time.monotonic() - flushed >= _FLUSH_S:
                    flushed, flushes = time.monotonic(), flushes + 1
                    self._store.flush(summaries=flushes % _SUMMARIES == 0)
                self._answer(host, now + self._every)
                if self._stop.wait(max(0.0, now + self._every - time.time())):
                    return
        except (InputError, OSError) as error:
            self._say(f"this host is sampled no longer ({error})")

    def _answer(self, host: str, until: float) -> None:
        """Go on with the burst that is asked for, until so late."""
        if self._burst is None:
            request = request_in(self._path.parent)
            if request is None or request.name == self._answered:
                return
            self._answered = request.name
            self._burst, self._quick = Burst(request, self._path, host), Rates()
        while time.time() < until and not self._burst.is_over:
            if self._stop.wait(EVERY_S):
                break
            values: Values = {}
            for sampler in self._samplers:
                values |= sampler.sample()
            self._burst.write(self._quick.of(values, time.monotonic()))
        if self._burst.is_over or self._stop.is_set():
            self._burst.close()
            self._burst = None

    def close(self) -> None:
        """End sampling, and write what is left."""
        self._stop.set()
        self._thread.join()
        for sampler in self._samplers:
            if isinstance(sampler, Closing):
                sampler.close()
        with contextlib.suppress(InputError):
            self._store.close()
