"""Answers that follow a grammar: JSON, a schema, a regular expression, a grammar of one's own.

llguidance says after each token which may come next. The API process writes the grammar and
refuses what cannot be one; the engine's process makes the masks. An answer that ends by itself
follows the grammar; one that was cut at its length may not.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tutti.errors import InputError
from tutti.optional_imports import library

MOST_BYTES = 1 << 18  # of a grammar
ANY_OBJECT: dict[str, Any] = {"type": "object"}


def of_schema(schema: dict[str, Any] | bool) -> str:
    """Return the grammar of JSON that follows a schema."""
    guidance = library("llguidance", "a schema")
    whitespace = {"x-guidance": {"whitespace_flexible": False}}
    wanted = {**whitespace, **schema} if isinstance(schema, dict) else schema
    return _checked(lambda: guidance.LLMatcher.grammar_from_json_schema(json.dumps(wanted)))


def of_regex(pattern: str) -> str:
    """Return the grammar of texts that a regular expression matches as a whole."""
    guidance = library("llguidance", "a regular expression")
    return _checked(lambda: guidance.LLMatcher.grammar_from_regex(pattern))


def of_lark(text: str) -> str:
    """Return a grammar that is written in Lark's form."""
    guidance = library("llguidance", "a grammar")
    return _checked(lambda: guidance.LLMatcher.grammar_from_lark(text))


def _checked(make: Any) -> str:
    """Return a grammar that can be one: small enough, and without mistakes."""
    guidance = library("llguidance", "a grammar")
    try:
        grammar: str = make()
    except (ValueError, RuntimeError) as error:
        raise InputError(f"the grammar cannot be read: {_line(str(error))}") from None
    if len(grammar) > MOST_BYTES:
        raise InputError(f"the grammar has {len(grammar)} bytes; {MOST_BYTES} may be sent")
    wrong = guidance.LLMatcher.validate_grammar(grammar)
    if wrong:
        raise InputError(f"the grammar cannot be read: {_line(wrong)}")
    return grammar


def _line(text: str) -> str:
    said = text.partition("<state>")[0]  # what follows is the state of the library's parser
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return " ".join(lines)[:300] if lines else "no reason is known"


class Grammars:
    """Makes masks for one model: its tokenizer's bytes by token."""

    def __init__(self, folder: Path, vocab: int, end: Sequence[int]) -> None:
        self._folder, self._vocab, self._end = folder, vocab, tuple(end)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        path = self._folder / "tokenizer.json"
        if not path.is_file():
            raise InputError(f"{self._folder}: grammars need a tokenizer.json, and there is none")
        if not self._end:
            raise InputError("grammars need a model with an end token, and none is known")
        guidance = library("llguidance", "grammars")
        return guidance.LLTokenizer(path.read_text(), n_vocab=self._vocab, eos_token=self._end[0])

    def masks(self, grammar: str) -> GrammarMasks:
        """Return the masks of a request."""
        return GrammarMasks(self._tokenizer, grammar, self._vocab, self._end)


class GrammarMasks:
    """Masks for the samples of one request; its grammar is compiled once."""

    def __init__(
        self,
        tokenizer: Any,
        grammar: str,
        vocab: int,
        end: tuple[int, ...],
    ) -> None:
        guidance = library("llguidance", "grammars")
        self._first = guidance.LLMatcher(tokenizer, grammar)
        self._vocab, self._end = vocab, end
        if self._first.is_error():
            raise InputError(f"the grammar cannot be used: {_line(self._first.get_error())}")
        if not _begins(self._first.deep_copy(), vocab):
            raise InputError(
                "the grammar cannot be used: no text of this model's begins as it says"
            )

    def new(self) -> GrammarMask:
        """Return the mask of a sample that has no tokens yet."""
        return GrammarMask(self._first.deep_copy(), self._vocab, self._end)


def _begins(matcher: Any, vocab: int) -> bool:
    """Tell whether an answer has a first token: a rule that only leads to itself has none."""
    from llguidance.numpy import fill_next_token_bitmask

    if matcher.is_stopped():
        return not matcher.is_error()
    bits = np.zeros((1, -(-vocab // 32)), np.int32)
    fill_next_token_bitmask(matcher, bits, 0)
    return not matcher.is_error() and bool(bits.any())


class GrammarMask:
    """Which tokens may follow those of one sample."""

    def __init__(self, matcher: Any, vocab: int, end: tuple[int, ...]) -> None:
        self._matcher, self._end = matcher, list(end)
        self._vocab, self._read = vocab, 0
        self._bits = np.zeros((1, -(-vocab // 32)), np.int32)

    def allowed(self, tokens: Sequence[int]) -> NDArray[np.bool_]:
        """Return which tokens may come; ends alone, where nothing else may."""
        from llguidance.numpy import fill_next_token_bitmask

        for token in tokens[self._read :]:
            if not self._matcher.is_stopped():
                self._matcher.consume_token(int(token))
            self._read += 1
        allowed_v = np.zeros(self._vocab, bool)
        if self._matcher.is_stopped():
            allowed_v[self._end] = True
            return allowed_v
        fill_next_token_bitmask(self._matcher, self._bits, 0)
        if self._matcher.is_error():
            raise RuntimeError(f"a grammar failed: {_line(self._matcher.get_error())}")
        whole = np.unpackbits(self._bits.view(np.uint8)[0], bitorder="little")
        allowed_v[:] = whole[: self._vocab].astype(bool)
        if allowed_v[self._end].any():
            allowed_v[self._end] = True
        return allowed_v
