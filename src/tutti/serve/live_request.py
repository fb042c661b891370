"""A request on its way, as its reader sees it: tokens, text, log-probabilities, times."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from tutti.batching import Finish, Request
from tutti.huggingface.tokenizer import Tokenizer
from tutti.serve.outputs import Answer, Completion, Piece, Times, TokenLogprob
from tutti.serve.parameters import SamplingParameters
from tutti.serve.text import TextStream

if TYPE_CHECKING:
    from torch import Tensor

    from tutti.serve.worker import StepResult

Found = tuple[np.ndarray, np.ndarray, np.ndarray]  # chosen; values; tokens


@dataclass(slots=True)
class _Sample:
    stream: TextStream | None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    reason: str = ""


class LiveRequest:
    """What came so far."""

    def __init__(
        self,
        request: Request,
        parameters: SamplingParameters,
        tokenizer: Tokenizer | None,
        pooling: str | None,
    ) -> None:
        self.request, self.parameters = request, parameters
        self._pooling, self._tokenizer = pooling, tokenizer
        self._samples = [
            _Sample(None if tokenizer is None else TextStream(tokenizer, parameters.stop))
            for _ in range(request.samples)
        ]
        self._began = time.perf_counter()
        self._first_token: float | None = None
        self._prompt_logprobs: list[TokenLogprob] = []
        self._states: Tensor | None = None

    @property
    def is_over(self) -> bool:
        """Whether all samples have ended."""
        return all(sample.finish is not None for sample in self._samples)

    def stopped(self, sample: int) -> bool:
        """Tell whether a sample's text came to a stop text."""
        stream = self._samples[sample].stream
        return stream is not None and stream.stopped

    def added(self, sample: int, token: int, place: int, result: StepResult, now: float) -> Piece:
        """Take a token of a sample; `place` is its place in the step's samples."""
        own = self._samples[sample]
        if self._first_token is None:
            self._first_token = now - self._began
        failed = bool(result.ends[place] == 2)
        if failed:
            own.reason = result.failures.get(place) or (
                f"request {self.request.id}: its logits were no numbers in step {result.number}; "
                f"{result.culprit} was the first that was not finite"
            )
            return Piece(
                request=self.request.id, sample=sample, tokens=(), text="", reason=own.reason
            )
        if self.stopped(sample):  # guessed, and right, but behind the end
            return Piece(request=self.request.id, sample=sample, tokens=(), text="")
        own.tokens.append(token)
        said = self._said(own, token)
        own.text += said or ""
        logprobs = None
        if self.parameters.logprobs is not None and result.logprobs is not None:
            own.logprobs.append(_logprob(token, result.logprobs, place, self.parameters.logprobs))
            logprobs = (own.logprobs[-1],)
        return Piece(
            request=self.request.id, sample=sample, tokens=(token,), text=said, logprobs=logprobs
        )

    def _said(self, own: _Sample, token: int) -> str | None:
        if own.stream is None or self._tokenizer is None:
            return None
        return "" if token in self._tokenizer.special else own.stream.add([token])

    def end(self, sample: int, finish: Finish) -> Piece:
        """Close a sample; return the rest of its text."""
        own = self._samples[sample]
        own.finish = finish
        rest = None if own.stream is None else own.stream.close()
        own.text += rest or ""
        return Piece(
            request=self.request.id, sample=sample, tokens=(), text=rest, finish=finish,
            reason=own.reason,
        )  # fmt: skip

    @staticmethod
    def joined(first: Piece, last: Piece) -> Piece:
        """Return two pieces of one sample as one."""
        text = None if first.text is None else first.text + (last.text or "")
        logprobs = first.logprobs
        if logprobs is not None:
            logprobs += last.logprobs or ()
        return replace(
            first,
            tokens=first.tokens + last.tokens,
            text=text,
            finish=last.finish,
            reason=last.reason,
            logprobs=logprobs,
        )

    def note_prompt(self, start: int, logprobs: Found) -> None:
        """Take log-probabilities of the prompt's tokens after those of a chunk."""
        del self._prompt_logprobs[start:]
        count = self.parameters.prompt_logprobs or 0
        for place in range(len(logprobs[0])):
            token = self.request.prompt[start + 1 + place]
            self._prompt_logprobs.append(_logprob(token, logprobs, place, count))

    def note_states(self, start: int, states: Tensor) -> None:
        """Take the sum of a chunk's hidden states, or the last one."""
        fresh = start == 0 or self._pooling == "last" or self._states is None
        self._states = states if fresh or self._states is None else self._states + states

    def embedding(self) -> Tensor:
        """Return the request's vector."""
        assert self._states is not None
        return self._states / len(self.request.prompt) if self._pooling == "mean" else self._states

    def completion(self, cached: int, now: float) -> Completion:
        """Return the whole request."""
        prompt = None
        if self.parameters.prompt_logprobs is not None:
            prompt = (None, *self._prompt_logprobs)
        return Completion(
            request=self.request.id,
            prompt=self.request.prompt,
            answers=tuple(self._answer(sample) for sample in self._samples),
            cached_tokens=cached,
            times=Times(first_token_s=self._first_token, whole_s=now - self._began),
            prompt_logprobs=prompt,
            embedding=None if self._pooling is None or self._states is None else self.embedding(),
        )

    def _answer(self, own: _Sample) -> Answer:
        assert own.finish is not None
        return Answer(
            tokens=tuple(own.tokens),
            text=None if own.stream is None else own.text,
            finish=own.finish,
            reason=own.reason,
            logprobs=None if self.parameters.logprobs is None else tuple(own.logprobs),
        )


def _logprob(token: int, logprobs: Found, place: int, count: int) -> TokenLogprob:
    chosen, values, tokens = logprobs
    top = zip(tokens[place, :count].tolist(), values[place, :count].tolist(), strict=True)
    return TokenLogprob(token=token, logprob=float(chosen[place]), top=tuple(top))
