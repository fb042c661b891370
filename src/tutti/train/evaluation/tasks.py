"""Tasks: records into tokens whose likelihood is asked for, and likelihoods into figures. No torch.

A record of a multiple-choice task has a context (`context`, `question` or `messages`), its
`choices`, and the `answer`: the right choice's number from 0, its letter, or its text. A choice is
what follows the context; tokens are those of both together, of which the context's are not counted.
A record of a text task has `text`: every token but the first is predicted once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.document import shown
from tutti.errors import InputError, hint
from tutti.huggingface.chat import messages_of
from tutti.huggingface.tokenizer import Tokenizer
from tutti.train.evaluation.config import TaskConfig

_CONTEXTS = ("context", "question", "messages", "prompt")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
HIGHER_IS_BETTER = ("accuracy", "accuracy_by_byte")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Tokens of which those from `first` on are scored."""

    tokens: tuple[int, ...]
    first: int
    num_bytes: int  # of the text that is scored


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationTask:
    """All that is asked of a model."""

    name: str
    kind: str  # "choices" or "text"
    items: tuple[Scored, ...]
    right: tuple[tuple[int, int, int], ...] = ()  # of each question: its items, the right one
    cut: int = 0  # contexts that lost their beginning

    @property
    def main(self) -> str:
        """The figure by which checkpoints are told apart."""
        return "accuracy" if self.kind == "choices" else "loss"

    def figures(self, logps: Sequence[float]) -> dict[str, float]:
        """Return what the items' log-probabilities come to."""
        if self.kind == "text":
            tokens = sum(len(item.tokens) - item.first for item in self.items)
            size = sum(item.num_bytes for item in self.items)
            loss = -sum(logps) / max(1, tokens)
            bits = -sum(logps) / math.log(2) / max(1, size)
            return {
                "loss": loss, "perplexity": math.exp(min(loss, 700.0)), "bits_per_byte": bits,
                "tokens": float(tokens),
            }  # fmt: skip
        hits, by_byte, correct = 0, 0, 0.0
        for start, stop, right in self.right:
            own = list(logps[start:stop])
            sizes = [max(1, item.num_bytes) for item in self.items[start:stop]]
            hits += own.index(max(own)) == right
            each = [value / size for value, size in zip(own, sizes, strict=True)]
            by_byte += each.index(max(each)) == right
            correct += own[right]
        count = len(self.right)
        return {
            "accuracy": hits / count, "accuracy_by_byte": by_byte / count,
            "answer_loss": -correct / count, "questions": float(count),
        }  # fmt: skip


def better(figure: str, one: float, other: float) -> bool:
    """Tell whether one value of a figure is better than another."""
    higher = figure.rpartition("/")[2] in HIGHER_IS_BETTER
    return one > other if higher else one < other


def open_task(config: TaskConfig, tokenizer: Tokenizer, *, longest: int) -> EvaluationTask:
    """Read a task; contexts too long for `longest` tokens lose their beginning."""
    records = _records(Path(config.path), config.most)
    kind = config.kind
    if kind == "auto":
        kind = "choices" if "choices" in records[0][1] else "text"
    if kind == "text":
        return _text_task(config, records, tokenizer, longest)
    items: list[Scored] = []
    right: list[tuple[int, int, int]] = []
    cut = 0
    for number, record in records:
        place = f"{config.path}: line {number}"
        own, answer = _choices(record, place, tokenizer, config.delimiter)
        for item in own:
            if len(item.tokens) - item.first >= longest:
                raise InputError(
                    f"{place}: a choice of {len(item.tokens) - item.first} tokens; there is room "
                    f"for {longest - 1}"
                )
            lost = max(0, len(item.tokens) - longest)
            cut += bool(lost)
            items.append(
                Scored(tokens=item.tokens[lost:], first=item.first - lost, num_bytes=item.num_bytes)
            )
        right.append((len(items) - len(own), len(items), answer))
    return EvaluationTask(
        name=config.title, kind=kind, items=tuple(items), right=tuple(right), cut=cut
    )


def _records(path: Path, most: int) -> list[tuple[int, dict[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not valid UTF-8"
        raise InputError(f"{path}: cannot be read ({reason})") from None
    if path.suffix in (".txt", ".md"):
        records: list[tuple[int, dict[str, Any]]] = [(1, {"text": text})] if text.strip() else []
    else:
        records = []
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                raise InputError(f"{path}: line {number}: not valid JSON ({error})") from None
            if not isinstance(value, dict):
                raise InputError(f"{path}: line {number}: expected an object, found {shown(value)}")
            records.append((number, value))
    if not records:
        raise InputError(f"{path}: holds no records; a task needs one at least")
    return records[:most] if most else records


def _choices(
    record: Mapping[str, Any], place: str, tokenizer: Tokenizer, delimiter: str
) -> tuple[list[Scored], int]:
    name = next((own for own in _CONTEXTS if own in record), None)
    if name is None:
        raise InputError(f"{place}: no field 'context'; {hint('context', record)}")
    choices = record.get("choices")
    texts = isinstance(choices, list) and all(isinstance(c, str) and c for c in choices)
    if not texts or len(choices or ()) < 2:
        raise InputError(f"{place}: 'choices' is {shown(choices)}; expected two texts or more")
    assert isinstance(choices, list)
    right = _right(record.get("answer"), choices, place)
    value = record[name]
    if isinstance(value, str):
        if delimiter and not value.endswith((" ", "\n", delimiter)):
            choices = [c if c.startswith((" ", "\n")) else delimiter + c for c in choices]
        context, begin = value, tuple(tokenizer.begin)
    else:
        context = tokenizer.render(messages_of(value, lambda: place), prompt=True)
        begin = ()
    return [_pair(context, choice, begin, tokenizer) for choice in choices], right


def _pair(context: str, choice: str, begin: tuple[int, ...], tokenizer: Tokenizer) -> Scored:
    """Encode both together; spaces that end a context belong to the choice."""
    kept = context.rstrip(" ")
    choice = context[len(kept) :] + choice
    whole, first = (ids.tolist() for ids in tokenizer.encode([kept + choice, kept]))
    tokens = (*begin, *whole)
    start = len(begin) + len(first)
    if not start or start >= len(tokens):  # nothing before it, or both grew into one token
        start = max(1, min(start, len(tokens) - 1))
    return Scored(tokens=tokens, first=start, num_bytes=len(choice.encode()))


def _right(value: object, choices: list[str], place: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(choices):
        return value
    if isinstance(value, str):
        if value in choices:
            return choices.index(value)
        letter = _LETTERS.find(value.strip().upper()) if len(value.strip()) == 1 else -1
        if 0 <= letter < len(choices):
            return letter
    raise InputError(
        f"{place}: 'answer' is {shown(value)}; expected a number from 0 to {len(choices) - 1}, a "
        "letter, or the text of a choice"
    )


def _text_task(
    config: TaskConfig,
    records: list[tuple[int, dict[str, Any]]],
    tokenizer: Tokenizer,
    longest: int,
) -> EvaluationTask:
    items: list[Scored] = []
    for number, record in records:
        text = record.get("text")
        if not isinstance(text, str) or not text:
            raise InputError(f"{config.path}: line {number}: 'text' is {shown(text)}")
        items += _windows(text, tokenizer, longest)
    return EvaluationTask(name=config.title, kind="text", items=tuple(items))


def _windows(text: str, tokenizer: Tokenizer, longest: int) -> list[Scored]:
    """Return a text in windows that share one token: each but the first is predicted once."""
    tokens = (*tokenizer.begin, *tokenizer.encode([text])[0].tolist())
    size = len(text.encode())
    windows: list[Scored] = []
    for start in range(0, max(1, len(tokens) - 1), longest - 1):
        own = tokens[start : start + longest]
        if len(own) > 1:
            windows.append(Scored(tokens=own, first=1, num_bytes=size if not windows else 0))
    return windows


Say = Callable[[str], None]


def told(figures: Mapping[str, Mapping[str, float]]) -> str:
    """Return the main figures in one line."""
    return ", ".join(
        f"{task} " + (f"{own['accuracy']:.1%}" if "accuracy" in own else f"loss {own['loss']:.4f}")
        for task, own in figures.items()
    )
