"""What clients may ask for: numbers and switches are what they say, in every field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.served import write_tokenizer
from tutti.huggingface.tokenizer import open_tokenizer
from tutti.server.openai import requests
from tutti.server.openai.errors import ApiError
from tutti.server.openai.requests import Asked
from tutti.server.openai.sampling import conversation

LEAST: dict[str, dict[str, Any]] = {
    "CompletionRequest": {"prompt": "a"},
    "ChatRequest": {"messages": [{"role": "user", "content": "a"}]},
    "EmbeddingRequest": {"input": "a"},
    "TokenizeRequest": {"prompt": "a"},
    "DetokenizeRequest": {"tokens": [1]},
}
OTHERS = {
    "integer": [True, "1", 1.5], "number": [True, "0.5"], "boolean": [1, "true", "yes", 0.0],
}  # fmt: skip


def kinds(schema: dict[str, Any]) -> set[str]:
    """Return the plain types that a field may have."""
    return {part["type"] for part in (schema, *schema.get("anyOf", ())) if "type" in part}


def cases() -> list[tuple[str, str, object]]:
    found = []
    for name in LEAST:
        fields = getattr(requests, name).model_json_schema()["properties"]
        for field, schema in fields.items():
            for kind in kinds(schema) & set(OTHERS):
                found += [(name, field, value) for value in OTHERS[kind]]
            if "array" in kinds(schema) and field != "messages":
                found += [(name, field, [value]) for value in (True, 1.5, None)]
    return found


def test_least_requests_are_taken() -> None:
    for name, body in LEAST.items():
        getattr(requests, name)(**body)
    assert len(cases()) > 80


@pytest.mark.parametrize(("name", "field", "value"), cases())
def test_no_value_is_taken_for_another(name: str, field: str, value: object) -> None:
    kind: type[Asked] = getattr(requests, name)
    with pytest.raises(ValidationError) as refused:
        kind(**{**LEAST[name], field: value})
    assert field in str(refused.value)


def test_whole_numbers_are_numbers() -> None:
    asked = requests.CompletionRequest(prompt=[1, 2], temperature=1, logit_bias={"3": -5})
    assert (asked.temperature, asked.logit_bias, asked.prompt) == (1.0, {"3": -5.0}, [1, 2])


def test_a_chat_without_a_template_or_a_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    about = tmp_path / "tokenizer_config.json"
    about.write_text('{"eos_token": "<|im_end|>"}', encoding="utf-8")
    asked = requests.ChatRequest(**LEAST["ChatRequest"])
    with pytest.raises(ApiError) as refused:
        conversation(asked, open_tokenizer(str(tmp_path)))
    assert (refused.value.status, str(refused.value)) == (
        400, "the tokenizer has no chat template; use /v1/completions"
    )  # fmt: skip
    with pytest.raises(ApiError, match="the model's folder has no tokenizer: give token ids"):
        conversation(asked, None)
