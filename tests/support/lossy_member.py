"""A member of etcd's cluster that does what it is asked, or not, and answers as a test says."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, dict[str, Any]] | None  # status and body; None: the line breaks


class Member:
    """Its answers are those of `says(path, body)`; `asked` are the paths so far."""

    def __init__(self, says: Callable[[str, bytes], Answer]) -> None:
        asked = self.asked = list[str]()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                asked.append(self.path)
                answer = says(self.path, body)
                if answer is None:
                    return
                text = json.dumps(answer[1]).encode()
                self.send_response(answer[0])
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_request(self, *_args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def deaf_after(path: str, port: int) -> Callable[[str, bytes], Answer]:
    """Return what passes all on to a real member; its answers to requests of a path are lost."""

    def says(asked: str, body: bytes) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("POST", asked, body)
            response = connection.getresponse()
            found = json.loads(response.read())
        finally:
            connection.close()
        return None if asked.endswith(path) else (response.status, found)

    return says
