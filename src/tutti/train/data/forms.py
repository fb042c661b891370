"""One record to the documents that are trained on: a conversation, a pair, a preference, a verdict.

A supervised record becomes one document. A preference becomes two, the chosen answer and the
rejected one; a judged answer becomes that and, for the estimate that KTO needs, the same prompt
with the answer of the record before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tutti.document import shown
from tutti.errors import InputError, hint
from tutti.huggingface.chat import encode_chat, messages_of
from tutti.huggingface.tokenizer import Ids, Message, Tokenizer
from tutti.train.data.alpaca import ALPACA_FIELDS, alpaca_messages, alpaca_prompt
from tutti.train.data.config import MEND, Form
from tutti.train.data.sources.piece import Record

TOKEN_FIELDS = ("input_ids", "labels", "attention_mask")  # the last two may be absent
NO_LABEL = -100
DOCUMENTS = {Form.PREFERENCES: 2, Form.JUDGED: 2}  # of an example; others have one


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How the records of a source are read: settled once, from its first record."""

    form: Form
    fields: tuple[str, ...]  # the text; the messages; the prompt and what follows it
    loss: str = "answers"  # of supervised forms: which tokens have one
    weight: str = ""  # the field that holds a record's weight
    tools: str = ""  # the field that holds the tools of a conversation
    margin: str = ""  # the field that holds by how much the chosen answer is better
    skip: bool = False  # records that cannot be trained on

    @property
    def documents(self) -> int:
        """Documents that an example consists of."""
        return DOCUMENTS.get(self.form, 1)


class Document(NamedTuple):
    """Tokens, which of them have a loss, and the weight of that loss.

    The sign of an answer's weight says whether it is wanted; 0: only its likelihood is asked for.
    """

    tokens: Ids
    supervised: NDArray[np.bool_]
    weight: float
    margin: float = 0.0  # of a chosen answer: by how much it is better

    @property
    def has_loss(self) -> bool:
        """Whether something is left to predict; nothing stands before the first token to do so."""
        return bool(self.supervised[1:].any())


def examples(
    records: Iterable[Record], shape: Shape, tokenizer: Tokenizer, *, end: bool
) -> Iterator[tuple[Document, ...]]:
    """Yield the documents of each record; none of one that cannot be trained on."""
    maker = _Maker(shape, tokenizer, end=end)
    for record in records:
        if not maker.waits(record):
            yield _trainable(maker, record, shape)
    if maker.first is not None:
        yield _trainable(maker, maker.first, shape)


def _trainable(maker: _Maker, record: Record, shape: Shape) -> tuple[Document, ...]:
    try:
        documents = maker.documents(record)
    except InputError as error:
        if not shape.skip:
            raise InputError(f"{error}; {MEND}") from None
        return ()
    return documents if all(document.has_loss for document in documents) else ()


class _Maker:
    """Makes the documents of records, one after the other."""

    def __init__(self, shape: Shape, tokenizer: Tokenizer, *, end: bool) -> None:
        self._shape, self._tokenizer, self._end = shape, tokenizer, end
        self.first: Record | None = None  # of judged answers: is held against the last one
        self._answer: object = None  # of the judged record before

    def waits(self, record: Record) -> bool:
        """Tell whether a record has to wait for the others."""
        if self._shape.form is not Form.JUDGED or self.first is not None:
            return False
        self.first, self._answer = record, _mapping(record).get(self._shape.fields[1])
        return True

    def documents(self, record: Record) -> tuple[Document, ...]:
        shape, given = self._shape, _mapping(record)
        weight = _weight(record, shape.weight)
        if shape.form is Form.PREFERENCES:
            return self._preference(record, weight)
        if shape.form is Form.JUDGED:
            return self._judged(record, weight)
        tokens, mask = self._supervised(record, given)
        return (Document(tokens, _wanted(mask, shape.loss), weight),) if weight else ()

    def _supervised(
        self, record: Record, given: Mapping[str, Any]
    ) -> tuple[Ids, NDArray[np.bool_]]:
        shape, tokenizer = self._shape, self._tokenizer
        if shape.form is Form.TOKENS:
            return _given_tokens(record, shape.fields)
        if shape.form is Form.CHAT:
            messages = messages_of(_value(record, shape.fields[0]), record.place)
            tools = tools_of(given.get(shape.tools), record) if shape.tools else None
            return encode_chat(tokenizer, messages, record.place, tools=tools)
        if shape.form is Form.PAIRS:
            return self._answered(record, *(_value(record, name) for name in shape.fields[:2]))
        texts = {name: _text(record, name) for name in shape.fields if name in given}
        missing = next((name for name in ALPACA_FIELDS[:2] if name not in texts), None)
        if missing is not None:
            _value(record, missing)  # says so
        if tokenizer.has_template:
            return encode_chat(tokenizer, alpaca_messages(texts), record.place)
        return _pair(alpaca_prompt(texts), texts["output"], tokenizer, end=self._end)

    def _preference(self, record: Record, weight: float) -> tuple[Document, ...]:
        *prompt, chosen, rejected = self._shape.fields
        before = _value(record, prompt[0]) if prompt else None
        pair = [
            Document(*self._answered(record, before, _value(record, name)), sign * weight)
            for name, sign in ((chosen, 1.0), (rejected, -1.0))
        ]
        if np.array_equal(pair[0].tokens, pair[1].tokens):
            raise InputError(
                f"{record.place()}: '{chosen}' and '{rejected}' are the same answer, so nothing is "
                "preferred"
            )
        if self._shape.margin:
            pair[0] = pair[0]._replace(margin=_margin(record, self._shape.margin))
        return tuple(pair) if weight else ()

    def _judged(self, record: Record, weight: float) -> tuple[Document, ...]:
        _, completion, label = self._shape.fields
        verdict = _value(record, label)
        if not isinstance(verdict, bool) and verdict not in (0, 1):
            raise InputError(
                f"{record.place()}: '{label}' is {shown(verdict)}; expected true or false"
            )
        prompt, answer = _value(record, self._shape.fields[0]), _value(record, completion)
        other, self._answer = self._answer, answer
        if other is answer:
            raise InputError(
                f"{record.place()}: is the only judged answer; KTO holds it against the answers "
                "of others, so give it two at least"
            )
        own = Document(*self._answered(record, prompt, answer), weight if verdict else -weight)
        return (own, Document(*self._answered(record, prompt, other), 0.0)) if weight else ()

    def _answered(
        self, record: Record, prompt: object, answer: object
    ) -> tuple[Ids, NDArray[np.bool_]]:
        return answered(self._tokenizer, prompt, answer, record.place, end=self._end)


def answered(
    tokenizer: Tokenizer, prompt: object, answer: object, place: Callable[[], str], *, end: bool
) -> tuple[Ids, NDArray[np.bool_]]:
    """Return prompt and answer, of texts or of messages; the loss is on the answer."""
    if isinstance(answer, str) or answer is None:
        if not isinstance(prompt, str):
            raise InputError(
                f"{place()}: the answer is text, but the prompt is {shown(prompt)}; "
                "give both as text, or both as messages"
            )
        return _pair(prompt, answer or "", tokenizer, end=end)
    messages: list[Message] = []
    if isinstance(prompt, str):
        messages.append({"role": "user", "content": prompt})
    elif prompt is not None:
        messages += messages_of(prompt, place)
    messages += messages_of(answer, place)
    tokens, mask = encode_chat(tokenizer, messages, place)
    return tokens, _wanted(mask, "last")


def tools_of(value: object, record: Record) -> list[dict[str, Any]] | None:
    """Return the tools of a conversation; some data sets hold them as JSON text."""
    if isinstance(value, str):
        import json

        try:
            value = json.loads(value) if value.strip() else None
        except json.JSONDecodeError as error:
            raise InputError(f"{record.place()}: tools are no valid JSON ({error.msg})") from None
    if value is None:
        return None
    if not isinstance(value, Sequence) or not all(isinstance(tool, dict) for tool in value):
        raise InputError(f"{record.place()}: tools are {shown(value)}; expected a list of objects")
    return list(value) or None


def _given_tokens(record: Record, fields: Sequence[str]) -> tuple[Ids, NDArray[np.bool_]]:
    """Return tokens as they are given; a label that is not the token itself has no loss."""
    arrays: dict[str, Ids] = {}
    for name in fields:
        value = _value(record, name)
        if not isinstance(value, Sequence) or not all(type(one) is int for one in value):
            raise InputError(
                f"{record.place()}: '{name}' is {shown(value)}; expected whole numbers"
            )
        arrays[name] = np.asarray(value, np.int64)
    tokens = arrays["input_ids"]
    if tokens.min(initial=0) < 0:
        raise InputError(f"{record.place()}: 'input_ids' has {tokens.min()}; tokens are 0 or more")
    for name, own in arrays.items():
        if len(own) != len(tokens):
            raise InputError(
                f"{record.place()}: {len(tokens)} 'input_ids', but {len(own)} of '{name}'"
            )
    labels = arrays.get("labels", tokens)
    if ((labels != tokens) & (labels != NO_LABEL)).any():
        raise InputError(
            f"{record.place()}: 'labels' are other tokens than 'input_ids'; they are to be the "
            f"same, or {NO_LABEL} where there is no loss (shifting is not yours to do)"
        )
    seen = arrays.get("attention_mask", np.ones_like(tokens)) > 0
    return tokens[seen], (labels == tokens)[seen]


def _wanted(mask: NDArray[np.bool_], loss: str) -> NDArray[np.bool_]:
    """Return which tokens have a loss, where those of all answers are given."""
    if loss == "all":
        return np.ones_like(mask)
    if loss == "answers" or not mask.any():
        return mask
    last = int(np.flatnonzero(mask)[-1])
    before = np.flatnonzero(~mask[:last])
    first = int(before[-1]) + 1 if before.size else 0
    wanted = np.zeros_like(mask)
    wanted[first : last + 1] = True
    return wanted


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


def _weight(record: Record, name: str) -> float:
    if not name:
        return 1.0
    value = _value(record, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise InputError(
            f"{record.place()}: '{name}' is {shown(value)}; expected a weight of 0 or more"
        )
    return float(value)


def _margin(record: Record, name: str) -> float:
    value = _value(record, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e9:
        raise InputError(f"{record.place()}: '{name}' is {shown(value)}; expected a number")
    return float(value)


def _mapping(record: Record) -> dict[str, Any]:
    assert isinstance(record.value, dict)
    return record.value


def _value(record: Record, name: str) -> object:
    if name not in _mapping(record):
        raise InputError(f"{record.place()}: no field '{name}'; {hint(name, _mapping(record))}")
    return _mapping(record)[name]


def _text(record: Record, name: str) -> str:
    """Return the text of a field; "" where it is null."""
    value = _value(record, name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InputError(f"{record.place()}: '{name}' is {shown(value)}; expected text")
    return value


text_of = _text
