"""Calls of tools in what a model writes: the formats of Hermes and Qwen, Llama 3, Mistral."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tutti.huggingface.tokenizer import Tokenizer
from tutti.server.openai.requests import ToolFunction

Format = Literal["hermes", "llama3", "mistral"]
_OPENS = {"hermes": "<tool_call>", "llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
_CLOSES = {"hermes": "</tool_call>", "llama3": "<|eom_id|>", "mistral": ""}


@dataclass(frozen=True, slots=True)
class Call:
    """One call."""

    name: str
    arguments: str  # JSON

    def body(self, index: int | None = None) -> dict[str, Any]:
        """Return it as OpenAI has it; in a stream with its index."""
        made: dict[str, Any] = {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }
        return made if index is None else {"index": index, **made}


def format_of(tokenizer: Tokenizer) -> Format:
    """Return the format that a tokenizer's template asks models for."""
    template = tokenizer.template or ""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "hermes"
    return "llama3" if "python_tag" in template or '"parameters"' in template else "hermes"


def shown_tokens(kind: Format, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the special tokens that open or close a call: they must stay in the text."""
    marks = [mark for mark in (_OPENS[kind], _CLOSES[kind]) if mark]
    shown = set()
    for mark in marks:
        tokens = tokenizer.encode([mark])[0]
        if len(tokens) == 1:
            shown.add(int(tokens[0]))
    return frozenset(shown)


def parsed(text: str, kind: Format) -> tuple[str, list[Call]]:
    """Return the text around the calls, and the calls; what is no call stays text."""
    if kind == "hermes":
        return _hermes(text)
    if kind == "mistral":
        before, mark, rest = text.partition(_OPENS[kind])
        calls = _listed(rest) if mark else []
        return (before.strip(), calls) if calls else (text, [])
    body = text.replace(_OPENS[kind], "").replace(_CLOSES[kind], "").strip()
    calls = [call for part in body.split(";") for call in _listed(part)] or _listed(body)
    return ("", calls) if calls and body.startswith(("{", "[")) else (text, [])


def _hermes(text: str) -> tuple[str, list[Call]]:
    said, rest = "", text
    calls: list[Call] = []
    while True:
        before, mark, after = rest.partition(_OPENS["hermes"])
        said += before
        if not mark:
            return said.strip() if calls else said, calls
        inside, close, rest = after.partition(_CLOSES["hermes"])
        inner_calls = _listed(inside)
        if not inner_calls:
            said += mark + inside + close
        calls += inner_calls


def _listed(text: str) -> list[Call]:
    """Return the calls that a piece of JSON holds."""
    try:
        value = json.loads(text.strip())
    except ValueError:
        return []
    values = value if isinstance(value, list) else [value]
    calls = [_call(one) for one in values]
    return [call for call in calls if call is not None] if all(calls) else []


def _call(value: Any) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return Call(value["name"], arguments)
    return Call(value["name"], json.dumps(arguments))


def grammar(
    functions: Sequence[ToolFunction], names: Sequence[str] | None, kind: Format, several: bool
) -> str:
    """Return the grammar (Lark's form) of answers that call tools and say nothing else."""
    inside = "parameters" if kind == "llama3" else "arguments"
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function.name},
                inside: function.parameters or {"type": "object"},
            },
            "required": ["name", inside],
            "additionalProperties": False,
        }
        for function in functions
        if names is None or function.name in names
    ]
    schema: dict[str, Any] = {"anyOf": calls, "x-guidance": {"whitespace_flexible": False}}
    if kind == "mistral":
        most = {} if several else {"maxItems": 1}
        schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most,
                  "x-guidance": schema["x-guidance"]}  # fmt: skip
        return f'start: "{_OPENS[kind]}" body\nbody: %json {json.dumps(schema)}\n'
    body = f"body: %json {json.dumps(schema)}\n"
    if kind == "llama3":
        return f"start: body\n{body}"
    call = 'call: "<tool_call>\\n" body "\\n</tool_call>"\n'
    return "start: call" + (' ("\\n" call)*' if several else "") + "\n" + call + body


def may_begin(text: str, kind: Format) -> bool:
    """Tell whether a text has begun a call, or its end may be the beginning of one."""
    mark = _OPENS[kind]
    if mark in text or (kind == "llama3" and text.lstrip()[:1] in ("{", "[")):
        return True
    return any(text.endswith(mark[:count]) for count in range(1, len(mark)))
