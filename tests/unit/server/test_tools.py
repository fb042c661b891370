"""Calls of tools in what models write."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("msgspec")

from tutti.server.openai.tools import Format, may_begin, parsed

CALL = {"name": "weather", "arguments": {"city": "Łódź"}}
TEXT = json.dumps(CALL)


@pytest.mark.parametrize(
    ("kind", "text", "said", "count"),
    [
        ("hermes", f"<tool_call>\n{TEXT}\n</tool_call>", "", 1),
        ("hermes", f"Let me see. <tool_call>{TEXT}</tool_call><tool_call>{TEXT}</tool_call>",
         "Let me see.", 2),
        ("hermes", f"<tool_call>{TEXT}", "", 1),
        ("mistral", f"[TOOL_CALLS][{TEXT}, {TEXT}]", "", 2),
        ("llama3", json.dumps({"name": "weather", "parameters": CALL["arguments"]}), "", 1),
        ("llama3", f"<|python_tag|>{TEXT}<|eom_id|>", "", 1),
    ],
)  # fmt: skip
def test_calls_are_found(kind: Format, text: str, said: str, count: int) -> None:
    rest, calls = parsed(text, kind)
    assert (rest, len(calls)) == (said, count)
    for call in calls:
        assert call.name == "weather"
        assert json.loads(call.arguments) == CALL["arguments"]
        assert call.body(0)["index"] == 0


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("hermes", "no call at all"),
        ("hermes", "<tool_call>not json</tool_call> and more"),
        ("mistral", "[TOOL_CALLS] nothing"),
        ("llama3", '{"answer": 42}'),
        ("llama3", "[1, 2]"),
    ],
)
def test_what_is_no_call_stays_text(kind: Format, text: str) -> None:
    assert parsed(text, kind) == (text, [])


def test_text_is_held_where_a_call_may_begin() -> None:
    assert may_begin("so <tool", "hermes")
    assert may_begin("so <tool_call>{", "hermes")
    assert not may_begin("so <b", "hermes")
    assert may_begin(' {"name"', "llama3")
    assert not may_begin("plain", "mistral")
