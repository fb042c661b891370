"""Records to tokens: what of a record is text, what of it has a loss.

One piece of a file goes in, three arrays come out: all tokens, the length of each document, and,
for supervised forms, which tokens may be targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tutti.document import shown
from tutti.errors import InputError, hint
from tutti.huggingface.chat import encode_chat, messages_of
from tutti.huggingface.tokenizer import Ids, Tokenizer
from tutti.train.data.alpaca import ALPACA_FIELDS, alpaca_messages, alpaca_prompt
from tutti.train.data.config import Form, SourceConfig, SourceKind
from tutti.train.data.sources.find import reader_of
from tutti.train.data.sources.piece import FilePiece, Record

_BATCH_CHARACTERS = 1 << 20  # encoded together
_LONGEST_CHARACTERS = 4 << 20  # a longer document is encoded in parts that end with a line
_CHAT_FIELDS = ("messages", "conversations")


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """The documents of a piece, one after the other."""

    tokens: Ids
    lengths: NDArray[np.int64]
    supervised: NDArray[np.bool_] | None
    skipped: int  # records without text, or without a token that has a loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How the records of a source are read: settled once, from its first record."""

    form: Form
    fields: tuple[str, ...]  # the text; the messages; the prompt and the completion
    loss: str = "answers"  # of supervised forms: which tokens have one


def shape_of(source: SourceConfig, kind: SourceKind, files: Sequence[Path]) -> Shape:
    """Return what the records of a source hold."""
    if kind is SourceKind.TEXT:
        if source.form not in (Form.AUTO, Form.TEXT):
            raise InputError(f"{source.name}: plain text cannot be read as {source.form}")
        _require_answers(source)
        return Shape(form=Form.TEXT, fields=())
    reader = reader_of(kind, blocks=False)
    known = next(filter(None, map(reader.fields, files)), [])
    chat = next((n for n in (source.messages, *_CHAT_FIELDS) if n in known), source.messages)
    pair = (source.prompt, source.completion)
    form = source.form
    if form is Form.AUTO:
        form = _form(known, source.text, chat, pair)
    optional = ALPACA_FIELDS[2:] if form is Form.ALPACA else ()
    fields = {
        Form.TEXT: (source.text,), Form.CHAT: (chat or "messages",), Form.PAIRS: pair,
        Form.ALPACA: (*ALPACA_FIELDS[:2], *(name for name in optional if name in known)),
    }[form]  # fmt: skip
    for name in fields:
        if known and name not in known:
            raise InputError(f"{source.name}: the records have no '{name}'; {hint(name, known)}")
    if form is Form.TEXT:
        _require_answers(source)
    return Shape(form=form, fields=fields, loss=source.loss)


def _require_answers(source: SourceConfig) -> None:
    if source.loss != "answers":
        raise InputError(
            f"{source.name}: loss: {source.loss} is for chats and pairs; plain text has a loss on "
            "every token"
        )


def _form(known: Sequence[str], text: str, chat: str, pair: tuple[str, str]) -> Form:
    """Return what the fields of the first record say."""
    if text in known:
        return Form.TEXT
    if chat in known:
        return Form.CHAT
    if set(pair) <= set(known):
        return Form.PAIRS
    return Form.ALPACA if set(ALPACA_FIELDS[:2]) <= set(known) else Form.TEXT


def encode(
    piece: FilePiece,
    kind: SourceKind,
    shape: Shape,
    tokenizer: Tokenizer,
    *,
    blocks: bool,
    end: bool,
) -> Encoded:
    """Return the tokens of a piece."""
    records = reader_of(kind, blocks=blocks).records(piece, shape.fields)
    if shape.form is Form.TEXT:
        return _texts(records, shape, tokenizer, end=end)
    tokens: list[Ids] = []
    supervised: list[NDArray[np.bool_]] = []
    skipped = 0
    for record in records:
        ids, mask = example(record, shape, tokenizer, end=end)
        mask = _wanted(mask, shape.loss)
        if mask[1:].any():  # nothing stands before the first token to predict it
            tokens.append(ids)
            supervised.append(mask)
        else:
            skipped += 1
    return Encoded(
        tokens=_joined(tokens),
        lengths=np.asarray([len(ids) for ids in tokens], np.int64),
        supervised=np.concatenate([*supervised, np.zeros(0, np.bool_)]),
        skipped=skipped,
    )


def _wanted(mask: NDArray[np.bool_], loss: str) -> NDArray[np.bool_]:
    """Return which tokens have a loss, where those of all answers are given."""
    if loss == "all":
        return np.ones_like(mask)
    if loss == "answers" or not mask.any():
        return mask
    last = int(np.flatnonzero(mask)[-1])
    before = np.flatnonzero(~mask[:last])
    first = int(before[-1]) + 1 if before.size else 0
    found = np.zeros_like(mask)
    found[first : last + 1] = True
    return found


def example(
    record: Record, shape: Shape, tokenizer: Tokenizer, *, end: bool
) -> tuple[Ids, NDArray[np.bool_]]:
    """Return the tokens of a supervised record, and which of them have a loss."""
    if shape.form is Form.CHAT:
        return _chat(record, shape.fields[0], tokenizer)
    if shape.form is Form.PAIRS:
        prompt, completion = (_field(record, name) for name in shape.fields)
        return _pair(prompt, completion, tokenizer, end=end)
    given = {name: _field(record, name) for name in shape.fields if name in _mapping(record)}
    missing = next((name for name in ALPACA_FIELDS[:2] if name not in given), None)
    if missing is not None:
        _field(record, missing)  # says so
    if tokenizer.has_template:
        return encode_chat(tokenizer, alpaca_messages(given), record.place)
    return _pair(alpaca_prompt(given), given["output"], tokenizer, end=end)


def _joined(parts: Sequence[Ids]) -> Ids:
    return np.concatenate([*parts, np.zeros(0, np.int64)])


def _texts(records: Iterable[Record], shape: Shape, tokenizer: Tokenizer, *, end: bool) -> Encoded:
    begin = np.asarray(tokenizer.begin, np.int64)
    close = np.asarray([tokenizer.end] if end and tokenizer.end is not None else [], np.int64)
    parts: list[Ids] = []
    lengths: list[int] = []
    skipped = 0
    for texts in _batches(records, shape):
        portions = [_portions(text) for text in texts if text]
        skipped += len(texts) - len(portions)
        encoded = iter(tokenizer.encode([part for document in portions for part in document]))
        for document in portions:
            own = [begin, *(next(encoded) for _ in document), close]
            parts += own
            lengths.append(sum(map(len, own)))
    return Encoded(
        tokens=_joined(parts),
        lengths=np.asarray(lengths, np.int64),
        supervised=None,
        skipped=skipped,
    )


def _batches(records: Iterable[Record], shape: Shape) -> Iterator[list[str]]:
    texts: list[str] = []
    size = 0
    for record in records:
        text = _field(record, shape.fields[0]) if shape.fields else record.value
        assert isinstance(text, str)
        texts.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield texts
            texts, size = [], 0
    if texts:
        yield texts


def _portions(text: str) -> list[str]:
    """Return a text in parts that end with a line, so that no tokenizer gets gigabytes at once."""
    parts: list[str] = []
    at = 0
    while len(text) - at > _LONGEST_CHARACTERS:
        cut = text.rfind("\n", at, at + _LONGEST_CHARACTERS) + 1 or at + _LONGEST_CHARACTERS
        parts.append(text[at:cut])
        at = cut
    return [*parts, text[at:]]


def _mapping(record: Record) -> dict[str, Any]:
    assert isinstance(record.value, dict)
    return record.value


def _field(record: Record, name: str) -> str:
    """Return the text of a field; "" where it is null."""
    if name not in _mapping(record):
        raise InputError(f"{record.place()}: no field '{name}'; {hint(name, _mapping(record))}")
    value = _mapping(record)[name]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InputError(f"{record.place()}: '{name}' is {shown(value)}; expected text")
    return value


def _chat(record: Record, name: str, tokenizer: Tokenizer) -> tuple[Ids, NDArray[np.bool_]]:
    assert isinstance(record.value, dict)
    if name not in record.value:
        raise InputError(f"{record.place()}: no field '{name}'; {hint(name, record.value)}")
    messages = messages_of(record.value[name], record.place)
    return encode_chat(tokenizer, messages, record.place)


def _pair(
    prompt: str, completion: str, tokenizer: Tokenizer, *, end: bool
) -> tuple[Ids, NDArray[np.bool_]]:
    """Encode prompt and completion apart, as they are when the model is asked."""
    first, second = tokenizer.encode([prompt, completion])
    close = [tokenizer.end] if end and tokenizer.end is not None and len(second) else []
    tokens = np.concatenate([np.asarray(tokenizer.begin, np.int64), first, second, close])
    supervised = np.zeros(len(tokens), np.bool_)
    supervised[len(tokenizer.begin) + len(first) :] = True
    return tokens.astype(np.int64), supervised
