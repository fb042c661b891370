"""Conversations as tokens, with the loss on what the assistant says and nowhere else.

Where a chat template marks the assistant's turns (`{% generation %}`) the marks are taken. Others
are found by rendering: the conversation up to a turn, with the opening of that turn, must be a
prefix of the whole. A template for which it is not (one that rewrites earlier turns) is refused,
for a mask beside its text trains the wrong tokens.

A turn is trained up to its end-of-turn token. What a template writes behind that, mostly a line
break, the assistant never says: it stops there, and the template goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tutti.document import shown
from tutti.errors import InputError
from tutti.huggingface.template import TemplateRefusedError
from tutti.huggingface.tokenizer import Ids, Message, Tokenizer

ASSISTANT = "assistant"
_ROLES = {"human": "user", "gpt": ASSISTANT, "bot": ASSISTANT, "model": ASSISTANT}


def messages_of(value: object, place: Callable[[], str]) -> list[Message]:
    """Return messages with `role` and `content`; also from the keys `from` and `value`."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise InputError(f"{place()}: expected a list of messages, found {shown(value)}")
    messages: list[Message] = []
    for number, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise InputError(f"{place()}: message {number} is {shown(message)}, not an object")
        given: dict[str, Any] = {k: v for k, v in message.items() if v is not None}
        if "role" not in given and "from" in given:
            speaker = given.pop("from")
            given = {"role": _ROLES.get(speaker, speaker), "content": given.pop("value", None)}
        if not isinstance(given.get("role"), str):
            raise InputError(f"{place()}: message {number} has no 'role'")
        if not isinstance(given.get("content"), str) and "tool_calls" not in given:
            raise InputError(
                f"{place()}: message {number}: 'content' is {shown(given.get('content'))}; "
                f"expected text"
            )
        messages.append(given)
    return messages


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    place: Callable[[], str],
    *,
    tools: Sequence[Message] | None = None,
) -> tuple[Ids, NDArray[np.bool_]]:
    """Return a conversation's tokens, and which of them the assistant says."""
    try:
        marked = tokenizer.marked_chat(messages, tools)
        if marked is not None:
            return marked[0], _without_tails(tokenizer, *marked)
        text, spans = _spans(tokenizer, messages, place, tools)
    except TemplateRefusedError as error:
        raise InputError(f"{place()}: the chat template refuses it ({error.reason})") from None
    tokens, starts = tokenizer.encode_with_offsets(text)
    supervised = np.zeros(len(tokens), np.bool_)
    for first, last in spans:
        supervised |= (starts >= first) & (starts < last)
    return tokens, _without_tails(tokenizer, tokens, supervised)


def _without_tails(
    tokenizer: Tokenizer, tokens: Ids, supervised: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Return the mask without what follows the end-of-turn token of each turn.

    The tail of a turn is what it ends with of special tokens and white space; the first special
    token in it ends the turn. Without one, the white space is all that does.
    """
    kept = supervised.copy()
    ends = np.flatnonzero(supervised & ~np.append(supervised[1:], False)).tolist()
    for end in ends:
        at, last = end, None
        while at >= 0 and supervised[at]:
            token = int(tokens[at])
            if token in tokenizer.special:
                last = at
            elif tokenizer.decode([token]).strip():
                break
            at -= 1
        if last is not None:
            kept[last + 1 : end + 1] = False
    return kept


def _spans(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    place: Callable[[], str],
    tools: Sequence[Message] | None,
) -> tuple[str, list[tuple[int, int]]]:
    """Return the whole text, and the characters of each of the assistant's turns."""
    whole = tokenizer.render(messages, prompt=False, tools=tools)
    spans: list[tuple[int, int]] = []
    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        if number:
            before = tokenizer.render(messages[:number], prompt=True, tools=tools)
        else:
            before = _opening(tokenizer)
        after = tokenizer.render(messages[: number + 1], prompt=False, tools=tools)
        if not number and not after.startswith(before):
            before = ""
        if not (after.startswith(before) and whole.startswith(after)):
            raise InputError(
                f"{place()}: the chat template of {tokenizer.name} changes earlier text when "
                f"message {number} is added, so that the assistant's tokens cannot be told "
                f"apart; mark them in the template with {{% generation %}}"
            )
        spans.append((len(before), len(after)))
    return whole, spans


def _opening(tokenizer: Tokenizer) -> str:
    """Return what opens an assistant's turn that nothing precedes, where a template can say it."""
    try:
        return tokenizer.render([], prompt=True)
    except TemplateRefusedError:  # many templates look at the first message
        return ""
