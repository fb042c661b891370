"""Prompts that a model answers itself: forms, what is left out, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tutti.errors import InputError
from tutti.huggingface.tokenizer import ByteTokenizer
from tutti.models.objective import Objective
from tutti.models.sampling import Sampling
from tutti.train.data.config import DataConfig, SourceConfig
from tutti.train.data.open_data import PackedData, open_data
from tutti.train.data.prompt_rows import PromptRows, end_of_turn

OBJECTIVE = Objective(kind="grpo", sampling=Sampling(rewards=("a:b",), max_tokens=8))


def opened(
    tmp_path: Path, *records: Any, objective: Objective | None = OBJECTIVE, **source: Any
) -> PackedData:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = DataConfig(train=(SourceConfig(path=str(path), **source),), tokenizer="bytes")
    return open_data(config, sequence_length=48, vocabulary=300, objective=objective)


def rows_of(data: PackedData) -> PromptRows:
    rows = data.train.parts[0].rows
    assert isinstance(rows, PromptRows)
    return rows


def test_texts_and_messages_up_to_the_answer(tmp_path: Path) -> None:
    user, said = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
    rows = rows_of(
        opened(
            tmp_path, {"prompt": "a b", "more": 3}, {"prompt": [user]}, {"messages": [user, said]}
        )
    )
    texts = [ByteTokenizer().decode(one.tokens) for one in rows.prompts]
    assert texts == ["a b", "\x02user\nhi\x03\x02assistant\n", "\x02user\nhi\x03\x02assistant\n"]
    assert rows.prompts[0].record == {"prompt": "a b", "more": 3}
    assert end_of_turn(ByteTokenizer()) == 3


def test_prompts_without_room_are_counted_and_refused_if_all_are(tmp_path: Path) -> None:
    data = opened(tmp_path, {"prompt": "x" * 60}, {"prompt": "short"})
    assert rows_of(data).num_rows == 1
    assert "1 dropped" in str(data.reports[0])
    with pytest.raises(InputError, match="none of 1 prompts leaves room for an answer of 8 tokens"):
        opened(tmp_path, {"prompt": "x" * 60})


def test_bad_prompts_are_a_line_or_skipped(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="line 2: no field 'prompt'; did you mean 'promt'"):
        opened(tmp_path, {"prompt": "a"}, {"promt": "b"})
    with pytest.raises(InputError, match="line 1: 'prompt' is empty"):
        opened(tmp_path, {"prompt": ""})
    said = [{"role": "assistant", "content": "yes"}]
    with pytest.raises(InputError, match="no turn before the assistant's"):
        opened(tmp_path, {"prompt": said})
    data = opened(tmp_path, {"prompt": "a"}, {"prompt": ""}, broken="skip")
    assert rows_of(data).skipped == 1


def test_prompts_are_no_training_data_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds prompts without answers; let the model answer"):
        opened(tmp_path, {"prompt": "a"}, objective=None)
