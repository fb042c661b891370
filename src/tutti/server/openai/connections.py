"""A client's connection: how long and how large a request may be before it is one.

uvicorn waits for the end of headers for ever, and keeps as many of them as come; whoever sends a
byte a minute, or nothing, would hold a place until the server ends.
"""

from __future__ import annotations

from asyncio import TimerHandle, Transport

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tutti.server.openai.errors import ApiError, refused

HEADERS_S = 30.0  # that a connection has for the headers of a request
MOST_HEADERS = 1 << 16  # bytes of them, with the first line
_PHRASES = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


class Connection(HttpToolsProtocol):
    """A connection that is closed when headers do not come, or do not end."""

    _deadline: TimerHandle | None = None
    _reading = False  # headers that have begun and not ended
    _read = 0  # bytes of a request whose headers have not ended

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Begin to wait."""
        super().connection_made(transport)
        self._deadline = self.loop.call_later(HEADERS_S, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._wait_no_more()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on."""
        self._read += len(data)
        super().data_received(data)
        if self._reading and self._read > MOST_HEADERS and not self.transport.is_closing():
            text = f"headers of more than {MOST_HEADERS} bytes"
            self._refuse(ApiError(431, text))

    def on_message_begin(self) -> None:
        """Begin another request."""
        super().on_message_begin()
        self._wait_no_more()
        self._reading, self._read = True, 0
        self._deadline = self.loop.call_later(HEADERS_S, self._late)

    def on_headers_complete(self) -> None:
        """Let the request be served."""
        self._wait_no_more()
        self._reading = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self._refuse(refused(msg))

    def _late(self) -> None:
        if self._reading and not self.transport.is_closing():
            self._refuse(ApiError(408, f"no headers in {HEADERS_S:g} s"))
        else:
            self.transport.close()

    def _wait_no_more(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, error: ApiError) -> None:
        """Say why, and close: what follows cannot be told from the rest."""
        body = msgspec.json.encode(error.body())
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%s" % (error.status, _PHRASES[error.status], len(body), body)
        )
        self.transport.close()
