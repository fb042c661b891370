"""Prompts that a model answers itself: their tokens, and all fields of their records.

A prompt is a text, or messages, which the chat template renders up to where the assistant's turn
begins. Prompts are few beside what is trained on, so they are encoded when they are opened; nothing
of them is kept on disk.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tutti.document import shown
from tutti.errors import InputError, hint
from tutti.files import fingerprint
from tutti.huggingface.chat import encode_chat, messages_of
from tutti.huggingface.template import TemplateRefusedError
from tutti.huggingface.tokenizer import Message, Tokenizer
from tutti.train.data.config import MEND, SourceConfig, SourceKind
from tutti.train.data.packing import PackingReport
from tutti.train.data.row import Row, check_vocabulary, padded_row
from tutti.train.data.sources.find import reader_of
from tutti.train.data.sources.piece import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRecord:
    """One prompt."""

    tokens: tuple[int, ...]
    record: dict[str, Any]  # what rewards are told beside the answers


class PromptRows:
    """The prompts of a source; those too long for a row with an answer are left out."""

    def __init__(
        self,
        source: SourceConfig,
        kind: SourceKind,
        files: list[Path],
        tokenizer: Tokenizer,
        *,
        length: int,
        answer: int,
        vocabulary: int,
    ) -> None:
        self.name, self.length, self._pad = source.name, length, tokenizer.pad
        if kind in (SourceKind.TEXT, SourceKind.MEGATRON):
            raise InputError(f"{source.name}: prompts are records with a '{source.prompt}' field")
        reader = reader_of(kind, blocks=False)
        prompts: list[PromptRecord] = []
        self.skipped, long, longest = 0, 0, 0
        for record in (r for f in files for p in reader.pieces(f) for r in reader.records(p, ())):
            try:
                made = prompt_of(record, source, tokenizer)
            except InputError as error:
                if source.broken != "skip":
                    raise InputError(f"{error}; {MEND}") from None
                self.skipped += 1
                continue
            check_vocabulary(np.asarray(made.tokens), vocabulary, record.place())
            if len(made.tokens) + answer > length:
                long, longest = long + 1, max(longest, len(made.tokens))
                continue
            prompts.append(made)
        if not prompts:
            raise InputError(
                f"{source.name}: none of {long + self.skipped} prompts leaves room for an answer "
                f"of {answer} tokens in a row of {length} (the longest has {longest}); use a "
                "longer sequence_length, or fewer sampling.max_tokens"
            )
        self.prompts = tuple(prompts)
        tokens = sum(len(one.tokens) for one in prompts)
        self.report = PackingReport(
            documents=len(prompts) + long, tokens=tokens, rows=len(prompts), padding=0,
            truncated=0, dropped=long, noun="prompt",
        )  # fmt: skip
        self.digest = fingerprint([[one.tokens, one.record] for one in prompts] + [answer])

    @property
    def num_rows(self) -> int:
        """Prompts."""
        return len(self.prompts)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(one.tokens) for one in self.prompts)

    def row(self, index: int) -> Row:
        """Return a prompt as a row without a loss."""
        return padded_row(self.prompts[index].tokens, self.length, self._pad)


def prompt_of(record: Record, source: SourceConfig, tokenizer: Tokenizer) -> PromptRecord:
    """Return the prompt of a record: its text, or its messages up to the answer."""
    assert isinstance(record.value, dict)
    given = record.value
    names = (source.prompt, *filter(None, [source.messages]), "messages")
    name = next((own for own in names if own in given), None)
    if name is None:
        raise InputError(
            f"{record.place()}: no field '{source.prompt}'; {hint(source.prompt, given)}"
        )
    value = given[name]
    if isinstance(value, str):
        if not value:
            raise InputError(f"{record.place()}: '{name}' is empty")
        tokens = [*tokenizer.begin, *tokenizer.encode([value])[0].tolist()]
    else:
        tokens = _chat(messages_of(value, record.place), tokenizer, record.place)
    try:
        json.dumps(given)
    except (TypeError, ValueError) as error:
        raise InputError(f"{record.place()}: {error}; rewards are told text and numbers") from None
    return PromptRecord(tokens=tuple(map(int, tokens)), record=dict(given))


def _chat(messages: list[Message], tokenizer: Tokenizer, place: Callable[[], str]) -> list[int]:
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise InputError(f"{place()}: no turn before the assistant's, so nothing to answer")
    try:
        text = tokenizer.render(messages, prompt=True)
    except TemplateRefusedError as error:
        raise InputError(f"{place()}: the chat template refuses it ({error.reason})") from None
    return [int(token) for token in tokenizer.encode([text])[0]]


def end_of_turn(tokenizer: Tokenizer) -> int | None:
    """Return the token that ends the assistant's turn in a conversation, where there is one."""
    if not tokenizer.has_template:
        return None
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        tokens, said = encode_chat(tokenizer, turns, lambda: shown("a"))
    except InputError:
        return None
    last = int(tokens[said][-1]) if said.any() else -1
    plain = tokenizer.encode(["b"])[0].tolist()
    return None if last < 0 or last in plain else last
