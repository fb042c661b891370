"""The JSON of a request's body: what is no text, no number or too deep is refused in one line.

Python's own reader lets halves of surrogate pairs through, which no tokenizer takes and no answer
can quote.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

_decode = msgspec.json.Decoder().decode


class JsonRequest(Request):
    """A request whose body is JSON."""

    async def json(self) -> Any:
        """Return what the body says."""
        data = (await self.body()).removeprefix(codecs.BOM_UTF8)  # some editors begin files so
        try:
            return _decode(data)
        except RecursionError:
            why = "it is nested too deeply"
        except UnicodeDecodeError:
            why = "a text is no UTF-8"
        except msgspec.DecodeError as error:
            why = _half_of_a_pair(data) or str(error)
        raise HTTPException(400, f"the body is no JSON that can be read: {why}")


def _half_of_a_pair(data: bytes) -> str:
    """Return what is wrong where one half of a surrogate pair stands alone; "": something else."""
    try:
        json.dumps(json.loads(data), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "a text has one half of a surrogate pair"
    except (ValueError, RecursionError):
        pass
    return ""


class JsonRoute(APIRoute):
    """A route that reads its requests' bodies so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what serves a request."""
        handle = super().get_route_handler()

        async def read(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return read
