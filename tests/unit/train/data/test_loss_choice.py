"""Which tokens of a conversation have a loss: all answers, the last one, or everything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tutti.errors import InputError
from tutti.huggingface.tokenizer import open_tokenizer
from tutti.train.data.config import SourceConfig
from tutti.train.data.preview import look

CHAT = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "first"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "second"},
]


def trained(path: Path, loss: str) -> tuple[list[str], int]:
    tokenizer = open_tokenizer("bytes")
    found = look(SourceConfig(path=str(path), loss=loss), tokenizer, most=1)
    runs = found.examples[0].runs(tokenizer)
    return [text for text, has_loss in runs if has_loss], found.num_trained


def test_answers_the_last_of_them_and_everything(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n", encoding="utf-8")
    answers, many = trained(path, "answers")
    assert [text[:5] for text in answers] == ["first", "secon"]
    last, few = trained(path, "last")
    assert [text[:6] for text in last] == ["second"]
    every, most = trained(path, "all")
    assert len(every) == 1
    assert few < many < most


def test_plain_text_has_no_choice(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "words"}\n', encoding="utf-8")
    with pytest.raises(InputError, match="plain text has a loss on every token"):
        trained(path, "last")
