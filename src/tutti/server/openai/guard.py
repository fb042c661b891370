"""What every request goes through before its route: the key, the body's length, a count."""

from __future__ import annotations

import hmac
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tutti.server.messages import ServerConfig
from tutti.server.metrics import Metrics
from tutti.server.openai.errors import ApiError

OPEN = ("/health", "/ready", "/version")  # without a key


class Guard:
    """An ASGI application around another: streams pass through it untouched."""

    def __init__(self, app: ASGIApp, config: ServerConfig, metrics: Metrics) -> None:
        self._app, self._config, self._metrics = app, config, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, read, begun = 500, 0, False
        most = self._config.most_body

        async def counted(message: Message) -> None:
            nonlocal status, begun
            if message["type"] == "http.response.start":
                status, begun = int(message["status"]), True
            await send(message)

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > most:
                raise ApiError(413, f"the body has more than {most} bytes")
            return message

        try:
            self._check(scope)
            await self._app(scope, limited, counted)
        except ApiError as error:
            if begun:
                raise
            answer = JSONResponse(error.body(), error.status, error.headers())
            await answer(scope, receive, counted)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(route, str(status)).inc()

    def _check(self, scope: Scope) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if self._config.keys and scope["path"] not in OPEN and not self._fits(headers):
            raise ApiError(401, "the key is missing or wrong", code="invalid_api_key")
        length = headers.get(b"content-length", b"0")
        most = self._config.most_body
        if length.isdigit() and int(length) > most:
            raise ApiError(413, f"a body of {int(length)} bytes; {most} may be sent")

    def _fits(self, headers: dict[bytes, bytes]) -> bool:
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        fitting = [hmac.compare_digest(given, key.encode()) for key in self._config.keys]
        return any(fitting)  # all are compared, whichever fits


def guarded(app: Any, config: ServerConfig, metrics: Metrics) -> None:
    """Put the guard around an application."""
    app.add_middleware(Guard, config=config, metrics=metrics)
