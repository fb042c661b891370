"""A server of a folder at a limited rate, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import TracebackType


class SlowServer:
    """Serves a folder over HTTP; all connections share one rate."""

    def __init__(self, folder: Path, bytes_per_second: float) -> None:
        words = ["-m", "tutti.bench.storage.object_server", str(folder), str(bytes_per_second)]
        self._process = subprocess.Popen(
            [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()

    def __enter__(self) -> SlowServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate("")
