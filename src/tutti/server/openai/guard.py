"""What every request goes through before its route: the key, the body's length, a count."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tutti.server.messages import ServerConfig
from tutti.server.metrics import Metrics
from tutti.server.openai.errors import ApiError, engine_failed, refused

log = logging.getLogger("tutti.server")
BODY_S = 60.0  # that a piece of a request's body may take to come
LEAST_RATE = 16 << 10  # bytes a second that the whole of it comes at, after as long
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
        status, read, begun, whole = 500, 0, False, False
        most, began = self._config.most_body, time.monotonic()

        async def counted(message: Message) -> None:
            nonlocal status, begun
            if message["type"] == "http.response.start":
                status, begun = int(message["status"]), True
            await send(message)

        async def limited() -> Message:
            nonlocal read, whole
            if whole:
                return await receive()  # that the client has gone is waited for without an end
            left = began + BODY_S + read / LEAST_RATE - time.monotonic()
            try:
                message = await asyncio.wait_for(receive(), min(BODY_S, max(0.0, left)))
            except TimeoutError:
                raise HTTPException(
                    408,
                    f"the body came too slowly: {read} bytes in {time.monotonic() - began:.0f} s;"
                    f" no pause may be longer than {BODY_S:g} s, nor the whole come at less than"
                    f" {LEAST_RATE} bytes a second",
                ) from None
            read += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if read > most:
                raise HTTPException(413, f"the body has more than {most} bytes")
            return message

        try:
            self._check(scope)
            await self._app(scope, limited, counted)
        except ApiError as error:
            if begun:
                raise
            await _answer(error)(scope, receive, counted)
        except RecursionError:  # JSON that Python reads may still be too deep for what reads on
            if begun:
                raise
            await _answer(refused("the body is nested too deeply"))(scope, receive, counted)
        except Exception:
            if begun:
                raise
            log.exception("a request failed: %s %s", scope["method"], scope["path"])
            failed = engine_failed("the server failed on this request")
            await _answer(failed)(scope, receive, counted)
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


def _answer(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, error.headers())


def guarded(app: Any, config: ServerConfig, metrics: Metrics) -> None:
    """Put the guard around an application."""
    app.add_middleware(Guard, config=config, metrics=metrics)
