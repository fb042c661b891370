"""One sample as its reader sees it: text, log-probabilities, why it ended."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tutti.huggingface.tokenizer import Tokenizer
from tutti.serve.text import TextStream
from tutti.server.engine_client import EngineClient
from tutti.server.hooks import Shown
from tutti.server.messages import Likely, Update, Wishes
from tutti.server.openai.errors import ApiError


@dataclass(slots=True)
class Said:
    """What came of a sample at once."""

    sample: int
    text: str
    tokens: list[int]
    logprobs: list[Likely]
    finish: str | None = None


@dataclass(slots=True)
class Sample:
    """All of a sample so far."""

    number: int
    after: Shown | None = None  # what its texts go through
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Likely] = field(default_factory=list)
    prompt_logprobs: list[Likely] = field(default_factory=list)
    finish: str | None = None
    cached: int = 0

    async def follow(
        self,
        client: EngineClient,
        tokens: list[int],
        wishes: Wishes,
        tokenizer: Tokenizer | None,
        stops: Sequence[str],
        *,
        shown: frozenset[int] = frozenset(),
    ) -> AsyncGenerator[Said]:
        """Yield what comes; a stop text ends it. `shown`: special tokens that are text here."""
        stream = None if tokenizer is None else TextStream(tokenizer, stops)
        special = frozenset() if tokenizer is None else tokenizer.special - shown
        async with contextlib.aclosing(client.stream(tokens, wishes)) as updates:
            async for update in updates:
                said = self._take(update, stream, special)
                if stream is not None and stream.stopped:
                    said.finish = "stop"
                if self.after is not None:
                    said.text = self.after(said.text, said.finish is not None)
                self.text += said.text
                self.tokens += said.tokens
                self.logprobs += said.logprobs
                self.finish = said.finish
                yield said
                if said.finish is not None:
                    return

    def _take(self, update: Update, stream: TextStream | None, special: frozenset[int]) -> Said:
        self.cached = max(self.cached, update.cached)
        self.prompt_logprobs = self.prompt_logprobs or update.prompt_logprobs
        if update.finish == "failed":
            raise ApiError(500, update.reason or "the request failed", kind="server_error")
        text, count = "", 0
        if stream is not None:
            for token in update.tokens:
                if stream.stopped:
                    break
                text += "" if token in special else stream.add([token])
                count += 1
            if update.finish is not None:
                text += stream.close()
        else:
            count = len(update.tokens)
        finish = (
            None if update.finish is None else ("length" if update.finish == "length" else "stop")
        )
        return Said(self.number, text, update.tokens[:count], update.logprobs[:count], finish)


def chat_logprobs(logprobs: Sequence[Likely], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return log-probabilities as chats have them."""
    return {
        "content": [
            {
                **_entry(one.token, one.logprob, tokenizer),
                "top_logprobs": [_entry(token, value, tokenizer) for token, value in one.top],
            }
            for one in logprobs
        ],
        "refusal": None,
    }


def _entry(token: int, value: float, tokenizer: Tokenizer | None) -> dict[str, Any]:
    text = token_text(token, tokenizer)
    return {"token": text, "logprob": _finite(value), "bytes": list(text.encode())}


def token_text(token: int, tokenizer: Tokenizer | None) -> str:
    """Return a token as text, or its number where there is no tokenizer."""
    return f"token_id:{token}" if tokenizer is None else tokenizer.decode([token])


def _finite(value: float) -> float:
    """JSON has no infinity: a token that cannot be is said so, as OpenAI does."""
    return max(value, -9999.0)


def completion_logprobs(
    logprobs: Sequence[Likely | None], tokens: Sequence[int], tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Return log-probabilities as completions have them; None: of a prompt's first token."""
    texts = [token_text(token, tokenizer) for token in tokens]
    offsets, at = [], 0
    for text in texts:
        offsets.append(at)
        at += len(text)
    tops: list[dict[str, float] | None] = []
    for one in logprobs:
        if one is None:
            tops.append(None)
            continue
        likely = {token_text(token, tokenizer): _finite(value) for token, value in one.top}
        likely.setdefault(token_text(one.token, tokenizer), _finite(one.logprob))
        tops.append(likely)
    return {
        "tokens": texts,
        "token_logprobs": [None if one is None else _finite(one.logprob) for one in logprobs],
        "top_logprobs": tops,
        "text_offset": offsets,
    }
