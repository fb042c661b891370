"""An HTTP server of objects, slow on purpose: GET with ranges, HEAD, PUT, a list of names.

All connections share one rate. A PUT that breaks off leaves what came, as the worst servers do.
`heard` is called with the bytes of all PUTs so far, so that a test ends a client in the middle of
an upload, and not by a clock.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PIECE = 64 << 10


class Rate:
    """Bytes per second that all connections together may take."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, count: int) -> None:
        """Wait until so many bytes may pass."""
        if self._rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - 0.005) + count / self._rate
            wait = self._free_at - now
        if wait > 0:
            time.sleep(wait)


class ObjectServer:
    """Serves a folder until its block ends."""

    def __init__(
        self,
        folder: Path,
        rate: float | None = None,
        heard: Callable[[str, int], None] = lambda _name, _count: None,
        *,
        knows_ranges: bool = True,
    ) -> None:
        self.folder, self.heard, self.knows_ranges = folder, heard, knows_ranges
        self.rate = Rate(rate)
        self.failures: list[int] = []  # statuses with which the next requests are refused
        self.refuse_ranges = False  # a server that breaks when large files are read
        self.sent = self.received = 0
        self.lock = threading.Lock()
        outer = self

        class Handler(_Handler):
            server_of = outer

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> ObjectServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server_of: ObjectServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _path(self) -> Path:
        return self.server_of.folder / self.path.split("?")[0].strip("/")

    def _refused(self) -> bool:
        with self.server_of.lock:
            status = self.server_of.failures.pop(0) if self.server_of.failures else 0
        if status:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()
        return bool(status)

    def do_HEAD(self) -> None:
        """Say what a file is."""
        self._answer(body=False)

    def do_GET(self) -> None:
        """Send a file or a range of it, or the names in a folder."""
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        if self._refused():
            return
        path = self._path()
        if path.is_dir():
            names = "".join(
                f'<a href="{n.name}{"/" * n.is_dir()}">{n.name}</a>\n'
                for n in sorted(path.iterdir())
            )
            self._send(200, names.encode(), {"Content-Type": "text/html"}, body)
            return
        if not path.is_file():
            self._send(404, b"", {}, body)
            return
        size = path.stat().st_size
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        headers = {"ETag": f'"{path.stat().st_mtime_ns}-{size}"'}
        if self.server_of.knows_ranges:
            headers["Accept-Ranges"] = "bytes"
        if asked and self.server_of.refuse_ranges:
            self._send(500, b"", {}, body)
            return
        if asked and self.server_of.knows_ranges:
            start = int(asked[1])
            stop = min(size, int(asked[2]) + 1 if asked[2] else size)
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
            self._send_file(206, path, start, stop, headers, body)
            return
        self._send_file(200, path, 0, size, headers, body)

    def _send(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def _send_file(
        self, status: int, path: Path, start: int, stop: int, headers: dict[str, str], body: bool
    ) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(stop - start)}.items():
            self.send_header(key, value)
        self.end_headers()
        if not body:
            return
        with path.open("rb") as stream:
            stream.seek(start)
            while start < stop:
                piece = stream.read(min(PIECE, stop - start))
                self.server_of.rate.take(len(piece))
                self.wfile.write(piece)
                start += len(piece)
                with self.server_of.lock:
                    self.server_of.sent += len(piece)

    def do_PUT(self) -> None:
        """Take a file."""
        if self._refused():
            return
        path = self._path()
        path.parent.mkdir(parents=True, exist_ok=True)
        small = "Content-Length" in self.headers
        if small:  # a small object is there at once or not at all
            content = self.rfile.read(int(self.headers["Content-Length"]))
            self._heard(path, len(content))
            fresh = path.with_name(f".{path.name}")
            fresh.write_bytes(content)
            os.replace(fresh, path)
        else:
            with path.open("wb") as stream:
                while piece := self._chunk():
                    self.server_of.rate.take(len(piece))
                    stream.write(piece)
                    stream.flush()
                    self._heard(path, len(piece))
        self._send(201, b"", {}, body=True)

    def _heard(self, path: Path, count: int) -> None:
        with self.server_of.lock:
            self.server_of.received += count
            total = self.server_of.received
        self.server_of.heard(path.relative_to(self.server_of.folder).as_posix(), total)

    def _chunk(self) -> bytes:
        """Return the next piece of a body that comes in chunks."""
        size = int(self.rfile.readline().strip() or b"0", 16)
        content = self.rfile.read(size) if size else b""
        self.rfile.readline()
        return content


def main() -> None:
    """Serve FOLDER at RATE bytes per second until the input ends; the first line is the URL."""
    with ObjectServer(Path(sys.argv[1]), float(sys.argv[2])) as server:
        print(server.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
