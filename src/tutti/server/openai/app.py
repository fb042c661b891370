"""The routes of an API process."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from tutti.errors import InputError
from tutti.huggingface.tokenizer import Tokenizer
from tutti.server.engine_client import EngineClient, EngineFailedError
from tutti.server.hooks import HookError, Hooks
from tutti.server.messages import ServerConfig, Wishes
from tutti.server.metrics import Metrics
from tutti.server.openai import tools
from tutti.server.openai.body import JsonRoute
from tutti.server.openai.completions import Job
from tutti.server.openai.errors import (
    ERRORS,
    ApiError,
    busy,
    engine_failed,
    hook_failed,
    not_found,
    refused,
    unavailable,
)
from tutti.server.openai.guard import guarded
from tutti.server.openai.requests import (
    AdapterRequest,
    Asked,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    Sampled,
    TokenizeRequest,
)
from tutti.server.openai.sampling import (
    COMPLETION_TOKENS,
    conversation,
    encoded,
    grammar_of,
    needed,
    prompts_of,
    sampled_wishes,
)
from tutti.server.openai.tracing import RequestTimes, Tracing
from tutti.version import code_version

log = logging.getLogger("tutti.server")
PART = 64  # of a request with more vectors, or choices than the queue holds, that are under way
MOST_CHOICES = 8192  # of one request: prompts times samples


class Api:
    """What the routes share."""

    def __init__(
        self, config: ServerConfig, client: EngineClient, tokenizer: Tokenizer | None
    ) -> None:
        self.config, self.client, self.tokenizer = config, client, tokenizer
        self.metrics, self.hooks = Metrics(), Hooks()
        self.tracing = Tracing(config.traces)
        self.started = int(time.time())
        self.draining = False
        client.on_restart = self.metrics.restarts.inc

    def model(self, asked: Asked) -> str:
        """Return the adapter that a request's model is ("": the model itself); refuse others."""
        if asked.model in ("", self.config.name):
            return ""
        if asked.model in self.client.adapters:
            return asked.model
        known = ", ".join(f"'{name}'" for name in (self.config.name, *self.client.adapters))
        raise not_found(f"no model '{asked.model}' is served; there is {known}")

    def admit(self) -> None:
        """Refuse what comes while too much is here, or nobody computes."""
        if self.draining or self.client.state.draining:
            raise unavailable("the server is about to end")
        if not self.client.state.context:
            self.client.look()  # it may have said so a moment ago
        if not self.client.state.context:
            raise unavailable("the engine is not ready yet")
        self._seat(1)

    def _places(self, count: int) -> int:
        """Return how many of a request's choices may be under way at a time: all that fit."""
        if count > MOST_CHOICES:
            raise refused(
                f"{count} choices (prompts times 'n') in one request; send at most {MOST_CHOICES}"
            )
        most = self.config.queue
        return count if count <= most else min(PART, most)

    def _seat(self, count: int) -> None:
        """Turn away so many requests at a time where there are no places for them."""
        most = self.config.queue
        if self.client.num_asked + count > most:
            raise busy(self.client.num_asked, most)

    async def job(self, asked: Sampled) -> Job:
        """Return a request with its prompts and wishes."""
        asked = await self._before(asked)
        adapter, named = self.model(asked), asked.hooks or {}
        self.admit()
        self.hooks.check(named)
        kind: tools.Format | None = None
        state = self.client.state
        if isinstance(asked, ChatRequest):
            prompts = [await asyncio.to_thread(conversation, asked, self.tokenizer)]
            most = asked.max_completion_tokens or asked.max_tokens
            if asked.tools and asked.tool_choice != "none":
                kind = tools.format_of(needed(self.tokenizer))
        else:
            assert isinstance(asked, CompletionRequest)
            prompts = await asyncio.to_thread(prompts_of, asked.prompt, self.tokenizer, state.vocab)
            most = COMPLETION_TOKENS if asked.max_tokens is None else asked.max_tokens
            if most == 0 and not asked.echo:
                raise refused("'max_tokens' is 0: nothing is asked for", "max_tokens")
            most = max(1, most)
        if asked.stops:
            needed(self.tokenizer)
        if self.config.log_prompts:
            log.info("prompt: %s", asked.model_dump_json(exclude_none=True))
        grammar = await asyncio.to_thread(grammar_of, asked, kind)
        places = self._places(len(prompts) * (asked.n or 1))
        self._seat(places)
        wishes, repeated = [], []
        for prompt in [self._tokenised(one, named) for one in prompts]:
            own = sampled_wishes(asked, len(prompt), most, adapter, state, grammar)
            wishes += own
            repeated += [prompt] * len(own)
        return Job(
            asked, asked.model or self.config.name, self.client, self.metrics, self.tokenizer,
            repeated, wishes, kind, after=[self.hooks.after(named) for _ in wishes],
            places=places,
        )  # fmt: skip

    async def _before(self, asked: Sampled) -> Sampled:
        """Return a request as hooks leave it."""
        if not self.hooks.names:
            return asked
        given = asked.model_dump(mode="json", exclude_unset=True, by_alias=True)
        changed = await asyncio.to_thread(self.hooks.before, given)
        try:
            return type(asked).model_validate(changed)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise hook_failed(
                f"a hook made a request that cannot be: {place}: {first['msg']}"
            ) from None

    def _tokenised(self, tokens: list[int], named: dict[str, dict[str, Any]]) -> list[int]:
        """Return a prompt as hooks leave it."""
        ids = self.hooks.tokenised(tokens, named)
        wrong = next((token for token in ids if not 0 <= token < self.client.state.vocab), None)
        if wrong is not None:
            raise hook_failed(f"a hook made token {wrong}, which the vocabulary does not have")
        return ids

    async def answered(self, asked: Sampled, headers: Mapping[str, str]) -> Response:
        """Return an answer, whole or as a stream."""
        times = RequestTimes(headers)
        job = await self.job(asked)
        if self.tracing.is_on:
            job.tracing, job.times = self.tracing, times
        if asked.stream:
            return StreamingResponse(job.stream(), media_type="text/event-stream")
        return JSONResponse(await job.answer())

    async def embedded(self, asked: EmbeddingRequest) -> dict[str, Any]:
        """Return the vectors of some texts."""
        adapter, tokenizer = self.model(asked), self.tokenizer
        self.admit()
        state = self.client.state
        prompts = await asyncio.to_thread(prompts_of, asked.input, tokenizer, state.vocab)
        for prompt in prompts:
            if len(prompt) > state.context:
                raise refused(
                    f"a text of {len(prompt)} tokens: the context holds {state.context}", "input"
                )
        wishes = Wishes(max_tokens=1, adapter=adapter)
        vectors: list[list[float]] = []
        for start in range(0, len(prompts), PART):
            some = prompts[start : start + PART]
            vectors += await asyncio.gather(*(self._vector(p, wishes, asked.pooling) for p in some))
        if asked.dimensions is not None and asked.dimensions != len(vectors[0]):
            raise refused(
                f"'dimensions' may be {len(vectors[0])}: vectors are not cut", "dimensions"
            )
        count = sum(len(prompt) for prompt in prompts)
        return {
            "object": "list",
            "model": asked.model or self.config.name,
            "data": [
                {"object": "embedding", "index": index,
                 "embedding": _packed(vector) if asked.encoding_format == "base64" else vector}
                for index, vector in enumerate(vectors)
            ],
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }  # fmt: skip

    async def _vector(self, tokens: list[int], wishes: Wishes, pooling: str) -> list[float]:
        vector: list[float] = []
        async for update in self.client.stream(tokens, wishes, pooling):
            vector = update.embedding or vector
        return vector

    async def change_adapter(self, asked: AdapterRequest, *, load: bool) -> None:
        """Let an adapter come, or go."""
        if load and not asked.lora_path:
            raise refused("'lora_path' names the adapter's folder", "lora_path")
        await self.client.change_adapter(asked.lora_name, asked.lora_path if load else None)


def _packed(vector: list[float]) -> str:
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()


def make_app(api: Api) -> FastAPI:
    """Return the application."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await api.client.start()
        yield
        api.draining = True
        await api.client.close()

    app = FastAPI(
        title="tutti", version=code_version(), lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.router.route_class = JsonRoute
    guarded(app, api.config, api.metrics)
    _add_errors(app)
    _add_routes(app, api)
    _add_operation(app, api)
    _describe(app)
    return app


def _describe(app: FastAPI) -> None:
    """Leave out of the description what FastAPI says of its own errors: ours are 400."""
    described = app.openapi()
    for route in described["paths"].values():
        for operation in route.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        described.get("components", {}).get("schemas", {}).pop(name, None)


def _add_errors(app: FastAPI) -> None:
    """Give errors one form."""

    @app.exception_handler(ApiError)
    async def failed(_request: Request, error: ApiError) -> Response:
        return _response(error)

    @app.exception_handler(InputError)
    async def mistaken(_request: Request, error: InputError) -> Response:
        return _response(refused(str(error)))

    @app.exception_handler(EngineFailedError)
    async def broken(_request: Request, error: EngineFailedError) -> Response:
        return _response(engine_failed(str(error)))

    @app.exception_handler(HookError)
    async def hooked(_request: Request, error: HookError) -> Response:
        return _response(hook_failed(str(error)))

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][1:])
        message = str(first["msg"]).removeprefix("Value error, ")
        return _response(refused(f"{place}: {message}" if place else message, place or None))

    @app.exception_handler(HTTPException)
    async def unknown(_request: Request, error: HTTPException) -> Response:
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        return _response(ApiError(error.status_code, str(error.detail), kind=kind))


def _response(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers())


def _add_routes(app: FastAPI, api: Api) -> None:
    @app.post("/v1/completions", responses=ERRORS)
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        return await api.answered(asked, request.headers)

    @app.post("/v1/chat/completions", responses=ERRORS)
    async def chat(asked: ChatRequest, request: Request) -> Response:
        return await api.answered(asked, request.headers)

    @app.post("/v1/embeddings", responses=ERRORS)
    async def embeddings(asked: EmbeddingRequest) -> Response:
        return JSONResponse(await api.embedded(asked))

    @app.get("/v1/models", responses=ERRORS)
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_card(api, n) for n in _names(api)]})

    @app.get("/v1/models/{name:path}", responses=ERRORS)
    async def model(name: str) -> Response:
        if name not in _names(api):
            raise not_found(f"no model '{name}' is served")
        return JSONResponse(_card(api, name))

    @app.post("/v1/load_lora_adapter", responses=ERRORS)
    async def load(asked: AdapterRequest) -> Response:
        await api.change_adapter(asked, load=True)
        return JSONResponse({"loaded": asked.lora_name})

    @app.post("/v1/unload_lora_adapter", responses=ERRORS)
    async def unload(asked: AdapterRequest) -> Response:
        await api.change_adapter(asked, load=False)
        return JSONResponse({"unloaded": asked.lora_name})

    @app.post("/tokenize", responses=ERRORS)
    async def tokenize(asked: TokenizeRequest) -> Response:
        api.model(asked)
        own = needed(api.tokenizer)
        if asked.messages is not None:
            tokens = conversation(ChatRequest(messages=asked.messages), own)
        elif asked.add_special_tokens:
            tokens = encoded(asked.prompt or "", own)
        else:
            tokens = [int(token) for token in own.encode([asked.prompt or ""])[0]]
        context = api.client.state.context
        return JSONResponse({"count": len(tokens), "max_model_len": context, "tokens": tokens})

    @app.post("/detokenize", responses=ERRORS)
    async def detokenize(asked: DetokenizeRequest) -> Response:
        api.model(asked)
        own = needed(api.tokenizer)
        wrong = next((token for token in asked.tokens if token >= own.size), None)
        if wrong is not None:
            raise refused(f"token {wrong}: the tokenizer has 0 to {own.size - 1}", "tokens")
        return JSONResponse({"prompt": own.decode(asked.tokens)})


def _names(api: Api) -> list[str]:
    return [api.config.name, *api.client.adapters]


def _card(api: Api, name: str) -> dict[str, Any]:
    parent = None if name == api.config.name else api.config.name
    return {
        "id": name, "object": "model", "created": api.started, "owned_by": "tutti",
        "parent": parent, "max_model_len": api.client.state.context,
    }  # fmt: skip


def _add_operation(app: FastAPI, api: Api) -> None:
    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/ready", responses={503: ERRORS[503]})
    async def ready() -> Response:
        if not api.client.state.ready:
            api.client.look()
        state = api.client.state
        if not state.ready or state.draining:
            raise unavailable("the engine is not ready yet" if not state.draining else "draining")
        return JSONResponse({"status": "ready", "context": state.context, "slots": state.slots})

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": code_version()})

    @app.get("/metrics", response_class=PlainTextResponse, responses={401: ERRORS[401]})
    async def metrics() -> Response:
        return PlainTextResponse(api.metrics.text(api.client.load), media_type="text/plain")
