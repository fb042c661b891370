"""Whether an agent lives, over HTTP, for whoever starts it again when it does not (Kubernetes)."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tutti.errors import InputError
from tutti.server.hosts.agent import Agent

HUNG_S = 15.0  # without a turn of its loop


class Health:
    """Answers `/health` (its loop turns) and `/ready` (its ranks run)."""

    def __init__(self, agent: Agent, port: int) -> None:
        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                lives = time.monotonic() - agent.looked < HUNG_S
                known = {"/health": lives, "/ready": lives and agent.ready()}
                code = 404 if self.path not in known else 200 if known[self.path] else 503
                self.send_response(code)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_args: object) -> None:
                """Probes come every few seconds: they are no news."""

        try:
            self._server = ThreadingHTTPServer(("", port), Answer)
        except OSError as error:
            raise InputError(
                f"serve: port {port} cannot be taken ({error.strerror}); choose another with "
                "--health-port"
            ) from None
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """End."""
        self._server.shutdown()
        self._server.server_close()
