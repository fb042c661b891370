"""Records to tokens: what of a record is text, what of it has a loss.

One piece of a file goes in, arrays come out: all tokens, the length of each document, and, for
supervised forms, which tokens may be targets and what each document weighs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tutti.errors import InputError, hint
from tutti.huggingface.tokenizer import Ids, Tokenizer
from tutti.train.data.alpaca import ALPACA_FIELDS
from tutti.train.data.config import Form, SourceConfig, SourceKind
from tutti.train.data.forms import TOKEN_FIELDS, Shape, examples, text_of
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
    weights: NDArray[np.float32] | None = None  # of each document; None: all one
    margins: NDArray[np.float32] | None = None  # of each document; None: there are none


def holds_prompts(source: SourceConfig, kind: SourceKind, files: Sequence[Path]) -> bool:
    """Tell whether the records are prompts that nobody has answered."""
    if source.form is not Form.AUTO:
        return source.form is Form.PROMPTS
    if kind is SourceKind.TEXT:
        return False
    known = next(filter(None, map(reader_of(kind, blocks=False).fields, files)), [])
    chat = next((n for n in (source.messages, *_CHAT_FIELDS) if n in known), source.messages)
    return bool(known) and _form(known, source, chat) is Form.PROMPTS


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
    form = _form(known, source, chat) if source.form is Form.AUTO else source.form
    if form is Form.PROMPTS:
        raise InputError(
            f"{source.name}: holds prompts without answers; let the model answer them itself with "
            "objective: {kind: grpo}, or give a completion each"
        )
    optional = ALPACA_FIELDS[2:] if form is Form.ALPACA else ()
    prompt = (source.prompt,) if source.prompt in known else ()
    fields = {
        Form.TEXT: (source.text,), Form.CHAT: (chat or "messages",),
        Form.PAIRS: (source.prompt, source.completion),
        Form.ALPACA: (*ALPACA_FIELDS[:2], *(name for name in optional if name in known)),
        Form.PREFERENCES: (*prompt, source.chosen, source.rejected),
        Form.TOKENS: (TOKEN_FIELDS[0], *(name for name in TOKEN_FIELDS[1:] if name in known)),
        Form.JUDGED: (source.prompt, source.completion, source.label),
    }[form]  # fmt: skip
    for name in (*fields, *filter(None, [source.row_weight])):
        if known and name not in known:
            raise InputError(f"{source.name}: the records have no '{name}'; {hint(name, known)}")
    if form is Form.TEXT:
        _require_answers(source)
    return Shape(
        form=form,
        fields=fields,
        loss=source.loss,
        weight=source.row_weight,
        tools=source.tools if form is Form.CHAT and source.tools in known else "",
        margin=source.margin if form is Form.PREFERENCES and source.margin in known else "",
        skip=source.broken == "skip",
    )


def _require_answers(source: SourceConfig) -> None:
    if source.loss != "answers":
        raise InputError(
            f"{source.name}: loss: {source.loss} is for chats and pairs; plain text has a loss on "
            "every token"
        )
    if source.row_weight:
        raise InputError(f"{source.name}: row_weight is for chats and pairs, not for plain text")


def _form(known: Sequence[str], source: SourceConfig, chat: str) -> Form:
    """Return what the fields of the first record say."""
    answered = (source.prompt, source.completion)
    for form, fields in (
        (Form.TOKENS, TOKEN_FIELDS[:1]),
        (Form.TEXT, (source.text,)),
        (Form.PREFERENCES, (source.chosen, source.rejected)),
        (Form.CHAT, (chat,)),
        (Form.JUDGED, (*answered, source.label)),
        (Form.PAIRS, answered),
        (Form.ALPACA, ALPACA_FIELDS[:2]),
        (Form.PROMPTS, (source.prompt,)),
    ):
        if set(fields) <= set(known):
            return form
    return Form.TEXT


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
    wanted = (*shape.fields, *filter(None, (shape.weight, shape.tools, shape.margin)))
    records = reader_of(kind, blocks=blocks).records(piece, wanted)
    if shape.form is Form.TEXT:
        return _texts(records, shape, tokenizer, end=end)
    encoded = list(examples(records, shape, tokenizer, end=end))
    documents = [document for example in encoded for document in example]
    weights = np.asarray([document.weight for document in documents], np.float32)
    margins = np.asarray([document.margin for document in documents], np.float32)
    return Encoded(
        tokens=_joined([document.tokens for document in documents]),
        lengths=np.asarray([len(document.tokens) for document in documents], np.int64),
        supervised=np.concatenate([*(d.supervised for d in documents), np.zeros(0, np.bool_)]),
        skipped=sum(not example for example in encoded),
        weights=weights if shape.weight or shape.documents > 1 else None,
        margins=margins if shape.margin else None,
    )


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
        text = text_of(record, shape.fields[0]) if shape.fields else record.value
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
