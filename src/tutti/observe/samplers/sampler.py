"""What every sampler is: something that returns values by key, and says once what is missing.

A key is a figure's name and, in braces, its label (`name{nic="eth0"}`). Paths can be laid
elsewhere, so that tests bring a machine of their own. What may take long (a file system that hangs,
a tool of a vendor) is asked beside the samples, by a `BackgroundSampler`.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

Values = dict[str, float]
Say = Callable[[str], None]
ROOT = Path("/")
_JOIN_S = 2.0  # that an end waits for what is under way; who hangs longer is left alone


class Sampler(Protocol):
    """Something that can be sampled."""

    def sample(self) -> Values:
        """Return what it counts now."""
        ...


@runtime_checkable
class Closing(Protocol):
    """A sampler that has something to close."""

    def close(self) -> None:
        """Let go of it."""


class BackgroundSampler(ABC):
    """A sampler whose figures are asked for in a thread of its own; a sample has the newest.

    It rests `1 / share` times as long as asking took, and `every_s` at least.
    """

    def __init__(self, name: str, *, every_s: float, share: float) -> None:
        self._every, self._share = every_s, share
        self._values: Values = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def ask(self) -> Values | None:
        """Return the figures as they are now; None: there is nothing to ask, ever."""

    def start(self) -> None:
        """Begin to ask."""
        if self._thread.ident is None:
            self._thread.start()

    def sample(self) -> Values:
        """Return the newest figures; the first call begins to ask for them."""
        self.start()
        return dict(self._values)

    def close(self) -> None:
        """Ask no more."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=_JOIN_S)

    def _run(self) -> None:
        pause = 0.0
        while not self._stop.wait(pause):
            began = time.monotonic()
            values = self.ask()
            if values is None:
                return
            self._values = values
            pause = max(self._every, (time.monotonic() - began) / self._share)
