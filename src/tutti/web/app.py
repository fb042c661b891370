"""The dashboard's HTTP: the page, documents of views, streams of them, views as files."""

from __future__ import annotations

import asyncio
import functools
import hmac
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from urllib.parse import quote

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from tutti.errors import InputError
from tutti.web.page import live_page, policy, script, style
from tutti.web.saving import runs_document, view_page
from tutti.web.watched import VIEWS, Document, Watched

LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
EVERY_S = 1.0
_COOKIE = "tutti_dashboard"
_Next = Callable[[Request], Awaitable[Response]]


class _UnknownError(Exception):
    """An address that is none of a view."""


def make_app(runs: Sequence[Watched], *, token: str = "", every_s: float = EVERY_S) -> Starlette:
    """Return the application; with a `token`, only who has it gets an answer."""
    site = _Site(runs, every_s)
    app = Starlette(
        routes=[
            Route("/", _page), Route("/app.js", _script), Route("/app.css", _style),
            Route("/api/{view}/{run:int}", site.document), Route("/api/runs", site.document),
            Route("/live/{view}/{run:int}", site.stream), Route("/live/runs", site.stream),
            Route("/save/{view}/{run:int}", site.saved), Route("/save/runs", site.saved),
        ]
    )  # fmt: skip
    app.add_middleware(BaseHTTPMiddleware, dispatch=functools.partial(_guarded, token))
    return app


async def _guarded(token: str, request: Request, call_next: _Next) -> Response:
    """Answer those only that may ask, and forbid the page everything from outside."""
    given = request.query_params.get("token", "")
    if token:
        known = request.cookies.get(_COOKIE) or _bearer(request) or given
        if not hmac.compare_digest(known.encode(), token.encode()):
            return PlainTextResponse("the dashboard's token is missing or wrong\n", 401)
        if given and request.url.path == "/":
            answer: Response = RedirectResponse("/", 303)
            answer.set_cookie(_COOKIE, token, httponly=True, samesite="strict")
            return answer
    elif _host(request) not in LOOPBACK:  # a stranger's page whose name was pointed at this machine
        return PlainTextResponse("this dashboard is for its own machine\n", 421)
    answer = await call_next(request)
    answer.headers["Content-Security-Policy"] = policy()
    answer.headers["X-Content-Type-Options"] = "nosniff"
    answer.headers["Referrer-Policy"] = "no-referrer"
    answer.headers["Cache-Control"] = "no-store"
    return answer


def _host(request: Request) -> str:
    host = request.headers.get("host", "")
    return host.rsplit(":", 1)[0] if not host.endswith("]") else host


def _bearer(request: Request) -> str:
    return request.headers.get("authorization", "").removeprefix("Bearer ")


async def _page(request: Request) -> Response:
    del request
    return HTMLResponse(live_page())


async def _script(request: Request) -> Response:
    del request
    return Response(script(), media_type="text/javascript")


async def _style(request: Request) -> Response:
    del request
    return Response(style(), media_type="text/css")


class _Site:
    """The runs that are watched."""

    def __init__(self, runs: Sequence[Watched], every_s: float) -> None:
        self._runs, self._every = runs, every_s

    def _asked(self, request: Request) -> tuple[str, int]:
        view, run = request.path_params.get("view", "runs"), request.path_params.get("run", 0)
        if view != "runs" and (view not in VIEWS or run >= len(self._runs)):
            raise _UnknownError
        return view, run

    def _make(self, view: str, run: int, query: dict[str, str]) -> Document:
        if view == "runs":
            return runs_document(self._runs)
        return self._runs[run].view(view, query)

    async def document(self, request: Request) -> Response:
        """Answer with the document of a view."""
        try:
            view, run = self._asked(request)
        except _UnknownError:
            return JSONResponse({"missing": "no such view or run"}, 404)
        document = await run_in_threadpool(self._make, view, run, dict(request.query_params))
        return JSONResponse(document)

    async def stream(self, request: Request) -> Response:
        """Answer with the document of a view whenever it has changed, as server-sent events."""
        try:
            view, run = self._asked(request)
        except _UnknownError:
            return PlainTextResponse("no such view or run\n", 404)
        changes = self._changes(request, view, run)
        return StreamingResponse(changes, media_type="text/event-stream")

    async def _changes(self, request: Request, view: str, run: int) -> AsyncIterator[str]:
        query, last = dict(request.query_params), ""
        while not await request.is_disconnected() and not _ends(request.app):
            stamp = await run_in_threadpool(self._stamp, view, run)
            document = await run_in_threadpool(self._make, view, run, query)
            text = json.dumps(document, separators=(",", ":"))
            # a heat map goes on where it ended: only new columns travel
            seconds = document.get("seconds")
            if text != last and not (document.get("more") and not seconds):
                yield f"data: {text}\n\n"
                last = text
            else:
                yield ": the same\n\n"
            if view == "heat" and seconds and "until" not in query:
                query["after"] = str(seconds[-1])
            await self._waited(stamp, view, run)

    def _stamp(self, view: str, run: int) -> object:
        return None if view == "runs" else self._runs[run].stamp(view)

    async def _waited(self, stamp: object, view: str, run: int) -> None:
        """Wait until a view may have changed since its stamp: a while, or less if it says so."""
        until = time.monotonic() + self._every
        await asyncio.sleep(self._every / 4)
        while stamp is not None and time.monotonic() < until:
            if await run_in_threadpool(self._stamp, view, run) != stamp:
                return
            await asyncio.sleep(self._every / 20)
        await asyncio.sleep(max(0.0, until - time.monotonic()))

    async def saved(self, request: Request) -> Response:
        """Answer with a view as a file that is complete in itself."""
        try:
            view, run = self._asked(request)
        except _UnknownError:
            return PlainTextResponse("no such view or run\n", 404)
        page = await run_in_threadpool(view_page, self._runs, view, run, dict(request.query_params))
        name = "runs" if view == "runs" else f"{self._runs[run].name}-{view}"
        headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(name)}.html"}
        return HTMLResponse(page, headers=headers)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens, or say in one line why there is none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(128)
    except (OSError, OverflowError) as error:
        bound.close()
        said = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"dashboard: cannot listen on {host}:{port} ({said}); --port 0 takes any that is free"
        ) from None
    return bound


def server_of(app: Starlette) -> uvicorn.Server:
    """Return the server of an application; its streams end when it is to exit."""
    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", ws="none",
        timeout_graceful_shutdown=5,
    )  # fmt: skip
    app.state.server = uvicorn.Server(settings)
    return app.state.server  # type: ignore[no-any-return]


def _ends(app: Starlette) -> bool:
    server: uvicorn.Server | None = getattr(app.state, "server", None)
    return server is not None and server.should_exit
