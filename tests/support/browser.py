"""Headless Chromium over its debugging pipe: screens of any size, pictures, layout.

A window of Chromium is at least 500 pixels wide, so a phone has to be emulated, which the command
line alone cannot do. Chromium speaks JSON over two file descriptors; nothing has to be installed.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars",
)  # fmt: skip
TIMEOUT_S = 60.0
# Chromium reads from descriptor 3 and writes to 4: put the pipes there and become it.
_AT_3_AND_4 = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One browser with one tab; to be used in a `with`."""

    def __init__(self) -> None:
        assert BROWSER is not None, "no chromium on the PATH"
        self._profile = tempfile.mkdtemp(prefix="tutti-browser-")
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _AT_3_AND_4, str(theirs_in), str(theirs_out), BROWSER,
             *FLAGS, f"--user-data-dir={self._profile}", "--remote-debugging-pipe", "about:blank"],
            pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._reader, self._writer = ours_in, ours_out
        self._buffer, self._number, self._session = b"", 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(10)
        os.close(self._reader)
        os.close(self._writer)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Return the answer to one command of the DevTools protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + TIMEOUT_S
        while True:
            while b"\0" not in self._buffer:
                left = until - time.monotonic()
                if left <= 0 or not select.select([self._reader], [], [], left)[0]:
                    raise TimeoutError(f"{method}: no answer within {TIMEOUT_S:g} s")
                part = os.read(self._reader, 1 << 20)
                if not part:
                    raise ConnectionError(f"{method}: the browser has ended")
                self._buffer += part
            text, _, self._buffer = self._buffer.partition(b"\0")
            answer = json.loads(text)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer.get("result", {})

    def open(
        self, page: Path, width: int, height: int, *, dark: bool = False, at: str = ""
    ) -> None:
        """Show a page on a screen of a size, and wait until it has drawn itself."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=page.resolve().as_uri() + at)
        drawn = (
            "document.readyState === 'complete' && location.protocol === 'file:' && "
            "(!document.getElementById('values') || !document.querySelector('canvas') || "
            "'drawn' in document.documentElement.dataset || "
            "'failed' in document.documentElement.dataset)"
        )
        until = time.monotonic() + TIMEOUT_S
        while not self.value(drawn):
            assert time.monotonic() < until, f"{page} has not drawn itself"
            time.sleep(0.05)
        assert self.value("document.documentElement.dataset.failed ?? ''") == ""

    def value(self, script: str) -> Any:
        """Return what a script comes to, on the page that is shown."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def picture(self, *, whole: bool = False, part: str = "") -> bytes:
        """Return what is seen as PNG; the `whole` page, or the `part` that a selector names."""
        options: dict[str, object] = {"format": "png"}
        if part:
            box = self.value(
                f"(r => ({{x: r.x + scrollX, y: r.y + scrollY, width: r.width, height: r.height, "
                f"scale: 1}}))(document.querySelector({json.dumps(part)}).getBoundingClientRect())"
            )
            options |= {"clip": box, "captureBeyondViewport": True}
        elif whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options |= {"clip": {**size, "scale": 1}, "captureBeyondViewport": True}
        return base64.b64decode(self.call("Page.captureScreenshot", **options)["data"])
