"""Work: the handle of an operation that runs in the background.

The executor's thread settles it once; any thread may wait for it. What was read from and written to
the operation's tensors is settled too: they are free again.
"""

from __future__ import annotations

import threading
from typing import Any

from tutti.comm.errors import CommTimeoutError


class Work:
    """An operation under way, or done."""

    def __init__(self, rank: int, name: str, result: Any = None) -> None:
        self.name = name  # such as "all_reduce gradients #17"
        self.rank = rank
        self._result = result
        self._settled = threading.Event()
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Tell whether it ended, well or not."""
        return self._settled.is_set()

    def exception(self) -> BaseException | None:
        """Return why it failed; None while it runs or when it went well."""
        return self._error

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait until it ended and return its result, or raise why it failed.

        The operation has a time-out of its own that names the rank to blame; `timeout_s` only
        bounds this call and leaves the operation running.
        """
        if not self._settled.wait(timeout_s):
            raise CommTimeoutError(
                f"rank {self.rank}: {self.name} still runs after {timeout_s:g} s",
                rank=self.rank,
                operation=self.name,
            )
        if self._error is not None:
            raise self._error
        return self._result

    def settle(self, error: BaseException | None = None) -> None:
        """End it; called once by whoever runs it."""
        self._error = error
        self._settled.set()
