"""Whether the chip waits for the host while it runs blocks: watched for one step.

Issuing a block's kernels takes the host as long as it takes, whatever their size; the chip's time
grows with the tokens. A chip that has begun a pass before the host is done with issuing it follows
on the host's heels and waits for most kernels: a graph, issued as one, is worth having. One that is
still busy with earlier passes has enough to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from tutti.accelerator.accelerator import Accelerator

WAITED_SHARE = 0.5
"""Of the passes: from here on the chip waits for the host more often than not."""


class ChipWaits(NamedTuple):
    """How often the chip waited."""

    waited: int  # passes that the chip had begun before the host had issued them
    passes: int

    @property
    def graphs_pay(self) -> bool:
        """Whether the chip waits for the host more often than not."""
        return self.waited >= WAITED_SHARE * self.passes


class LaunchWatch:
    """Watches the passes of blocks."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._waited = self._passes = 0

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Issue a pass of one block."""
        begin = self._accelerator.event()
        begin.record()
        yield
        self._passes += 1
        self._waited += begin.passed()

    def waits(self) -> ChipWaits | None:
        """Return what was seen; None if no pass was."""
        return ChipWaits(self._waited, self._passes) if self._passes else None
