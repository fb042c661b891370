"""`/v1/completions` and `/v1/chat/completions`: whole answers, and streams of pieces."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tutti.errors import InputError
from tutti.huggingface.tokenizer import Tokenizer
from tutti.server.engine_client import EngineClient, EngineFailedError
from tutti.server.hooks import HookError, Shown
from tutti.server.messages import Likely, Wishes
from tutti.server.metrics import Metrics
from tutti.server.openai import tools
from tutti.server.openai.errors import ApiError, engine_failed, hook_failed, refused
from tutti.server.openai.requests import ChatRequest, CompletionRequest, Sampled
from tutti.server.openai.sample_answer import Said, Sample, chat_logprobs, completion_logprobs
from tutti.server.openai.tracing import RequestTimes, Tracing

log = logging.getLogger("tutti.server")
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Job:
    """A request on its way: prompts and their samples, in the order of its choices."""

    asked: Sampled
    model: str
    client: EngineClient
    metrics: Metrics
    tokenizer: Tokenizer | None
    prompts: list[list[int]]  # of each choice
    wishes: list[Wishes]
    format: tools.Format | None = None
    after: list[Shown | None] = field(default_factory=list)  # what texts of each go through
    places: int = 0  # samples that may be under way at a time; 0: all
    tracing: Tracing | None = None
    times: RequestTimes = field(default_factory=RequestTimes)
    samples: list[Sample] = field(default_factory=list)
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        after = self.after or [None] * len(self.wishes)
        self.samples = [Sample(number, after[number]) for number in range(len(self.wishes))]
        kind = "chatcmpl" if isinstance(self.asked, ChatRequest) else "cmpl"
        self.id = f"{kind}-{secrets.token_hex(14)}"

    async def pieces(self) -> AsyncIterator[Said]:
        """Yield what comes of all samples until the last has ended."""
        queue: asyncio.Queue[Said | BaseException | None] = asyncio.Queue()
        shown: frozenset[int] = frozenset()
        if self.format is not None and self.tokenizer is not None:
            shown = tools.shown_tokens(self.format, self.tokenizer)

        places = asyncio.Semaphore(self.places or len(self.samples))

        async def follow(sample: Sample) -> None:
            place = sample.number
            try:
                async with places:
                    async for said in sample.follow(
                        self.client, self.prompts[place], self.wishes[place], self.tokenizer,
                        self.asked.stops, shown=shown,
                    ):  # fmt: skip
                        queue.put_nowait(said)
                queue.put_nowait(None)
            except Exception as error:  # whoever waits must hear of it
                queue.put_nowait(error)

        self.times.sent = time.time_ns()
        tasks = [asyncio.create_task(follow(sample)) for sample in self.samples]
        first: float | None = None
        last = self.began
        try:
            left = len(tasks)
            while left:
                said = await queue.get()
                if isinstance(said, BaseException):
                    raise _as_answer(said)
                if said is None:
                    left -= 1
                    continue
                now = time.perf_counter()
                if self.tracing is not None:
                    self.times.piece(said.sample, len(said.tokens))
                if said.tokens:
                    (self.metrics.first_token if first is None else self.metrics.gap).observe(
                        now - last
                    )
                    first, last = first or now, now
                yield said
        finally:
            for task in tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            self._note(first)
            if self.tracing is not None:
                self.tracing.ended(self.id, self.times, self._facts())

    def _facts(self) -> dict[str, Any]:
        """Return what a trace says of it: no text."""
        usage = self.usage()
        return {
            "id": self.id,
            "gen_ai.request.model": self.model,
            "gen_ai.request.max_tokens": self.wishes[0].max_tokens,
            "gen_ai.usage.input_tokens": usage["prompt_tokens"],
            "gen_ai.usage.output_tokens": usage["completion_tokens"],
            "tutti.cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "tutti.finish": ",".join(sample.finish or "unfinished" for sample in self.samples),
        }

    def _note(self, first: float | None) -> None:
        now, count = time.perf_counter(), sum(len(sample.tokens) for sample in self.samples)
        self.metrics.whole.observe(now - self.began)
        self.metrics.output_tokens.inc(count)
        self.metrics.prompt_tokens.inc(self._prompt_tokens())
        self.metrics.cached_tokens.inc(max((s.cached for s in self.samples), default=0))
        if first is not None and count > len(self.samples):
            self.metrics.per_token.observe((now - first) * len(self.samples) / count)

    def _prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts[:: self.asked.n or 1])

    def usage(self) -> dict[str, Any]:
        """Return what the request took."""
        prompt, new = self._prompt_tokens(), sum(len(s.tokens) for s in self.samples)
        cached = max((sample.cached for sample in self.samples), default=0)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    # --- whole answers ---------------------------------------------------------------------

    async def answer(self) -> dict[str, Any]:
        """Return the whole answer."""
        async for _ in self.pieces():
            pass
        chat = isinstance(self.asked, ChatRequest)
        choice = self._chat_choice if chat else self._completion_choice
        return {
            "id": self.id,
            "object": "chat.completion" if chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice(sample) for sample in self.samples],
            "usage": self.usage(),
        }

    def _completion_choice(self, sample: Sample) -> dict[str, Any]:
        asked = self.asked
        assert isinstance(asked, CompletionRequest)
        prompt = self.prompts[sample.number] if asked.echo else []
        new = [] if asked.max_tokens == 0 else sample.tokens
        text = "" if asked.max_tokens == 0 else sample.text
        if asked.echo and self.tokenizer is not None:
            text = self.tokenizer.decode(prompt) + text
        logprobs = None
        if asked.logprobs is not None:
            before: list[Likely | None] = [None, *sample.prompt_logprobs] if asked.echo else []
            likely = [*before, *(sample.logprobs if new else [])]
            logprobs = completion_logprobs(likely, [*prompt, *new], self.tokenizer)
        finish = "length" if asked.max_tokens == 0 else sample.finish
        return {
            "index": sample.number, "text": text, "logprobs": logprobs, "finish_reason": finish
        }  # fmt: skip

    def _chat_choice(self, sample: Sample) -> dict[str, Any]:
        content: str | None = sample.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        finish = sample.finish
        if self.format is not None:
            said, calls = tools.parsed(sample.text, self.format)
            if calls:
                message["content"] = said or None
                message["tool_calls"] = [call.body() for call in calls]
                finish = "tool_calls"
        logprobs = None
        if self.wishes[sample.number].logprobs is not None:
            logprobs = chat_logprobs(sample.logprobs, self.tokenizer)
        return {
            "index": sample.number, "message": message, "logprobs": logprobs,
            "finish_reason": finish,
        }  # fmt: skip

    # --- streams ---------------------------------------------------------------------------

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield an answer piece by piece, as events; an error ends it as one."""
        chat = isinstance(self.asked, ChatRequest)
        make = _ChatPieces(self) if chat else _CompletionPieces(self)
        try:
            for choice in make.opening():
                yield self._event([choice])
            async for said in self.pieces():
                for choice in make.choices(said):
                    yield self._event([choice])
        except ApiError as error:
            yield b"data: " + _encode(error.body()) + b"\n\n"
            return
        if self.asked.wants_usage:
            yield self._event([], usage=self.usage())
        yield b"data: [DONE]\n\n"

    def _event(self, choices: Sequence[dict[str, Any]], usage: Any = None) -> bytes:
        chat = isinstance(self.asked, ChatRequest)
        body: dict[str, Any] = {
            "id": self.id,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if self.asked.wants_usage:
            body["usage"] = usage
        return b"data: " + _encode(body) + b"\n\n"


def _as_answer(error: BaseException) -> ApiError:
    match error:
        case ApiError():
            return error
        case HookError():
            return hook_failed(str(error))
        case InputError():
            return refused(str(error))
        case EngineFailedError():
            return engine_failed(str(error))
    log.error("an answer failed", exc_info=error)
    return engine_failed("the server failed on this request")


class _CompletionPieces:
    """Pieces of completions."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def opening(self) -> list[dict[str, Any]]:
        return []

    def choices(self, said: Said) -> list[dict[str, Any]]:
        logprobs = None
        if self._job.wishes[said.sample].logprobs is not None:
            logprobs = completion_logprobs(said.logprobs, said.tokens, self._job.tokenizer)
        if not said.text and said.finish is None and logprobs is None:
            return []
        return [
            {"index": said.sample, "text": said.text, "logprobs": logprobs,
             "finish_reason": said.finish}
        ]  # fmt: skip


class _ChatPieces:
    """Pieces of chats; from where a call of a tool may begin, text is held until the end."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._held = ["" for _ in job.samples]
        self._parse: Callable[[str], tuple[str, list[tools.Call]]] = lambda text: (text, [])
        if job.format is not None:
            kind = job.format
            self._parse = lambda text: tools.parsed(text, kind)

    def opening(self) -> list[dict[str, Any]]:
        return [
            _chat_piece(sample.number, {"role": "assistant", "content": ""})
            for sample in self._job.samples
        ]

    def choices(self, said: Said) -> list[dict[str, Any]]:
        job, number = self._job, said.sample
        logprobs = None
        if job.wishes[number].logprobs is not None and said.logprobs:
            logprobs = chat_logprobs(said.logprobs, job.tokenizer)
        text, chunks = self._held[number] + said.text, []
        holds = job.format is not None and tools.may_begin(text, job.format)
        self._held[number] = text if holds and said.finish is None else ""
        finish = said.finish
        if holds and finish is not None:
            text, calls = self._parse(text)
            for index, call in enumerate(calls):
                chunks.append(_chat_piece(number, {"tool_calls": [call.body(index)]}))
                finish = "tool_calls"
        elif holds:
            text = ""
        if text or logprobs is not None:
            chunks.insert(0, _chat_piece(number, {"content": text}, logprobs))
        if finish is not None:
            chunks.append(_chat_piece(number, {}, None, finish))
        return chunks


def _chat_piece(
    number: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None
) -> dict[str, Any]:
    return {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
