"""Chat templates render as transformers renders them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from tutti.huggingface.tokenizer import FolderTokenizer  # noqa: E402

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Says how it is <there> & then, in °C",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }
]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Köln"}}}
TALKS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "  Hi there \n"}],
    [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "And <you>?"},
        {"role": "assistant", "content": "Fine.", "reasoning_content": "They ask."},
        {"role": "user", "content": "Köln?"},
    ],
    [
        {"role": "user", "content": "How is it in Köln?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "name": "weather", "content": "12"},
    ],
]
# Of the shapes that published templates have, each written anew and reduced to its means.
TEMPLATES = {
    "turns": (
        "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] | trim }}"
        "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
    "namespace, slices and tests": (
        "{%- set ns = namespace(last=-1, system='') -%}\n"
        "{%- if messages[0].role == 'system' %}{% set ns.system = messages[0].content %}"
        "{% set messages = messages[1:] %}{% endif -%}\n"
        "{%- for m in messages[::-1] %}\n"
        "    {%- if m.role == 'user' and ns.last < 0 %}{% set ns.last = loop.index0 %}{% endif %}\n"
        "{%- endfor %}\n"
        "{{- '[' ~ ns.system ~ '|' ~ ns.last ~ ']' }}\n"
        "{%- for m in messages %}\n"
        "    {%- if m.content is string and m.content is not none %}\n"
        "{{ m.role.upper() + ': ' + m.content.strip() }}\n"
        "    {%- endif %}\n"
        "{%- endfor %}"
    ),
    "tools": (
        "{%- if tools %}{{- '<tools>' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}"
        "{%- endfor %}{{- '\n</tools>' }}{%- endif %}"
        "{%- for m in messages %}{%- if m.tool_calls %}{%- for call in m.tool_calls %}"
        "{%- if call.function is defined %}{%- set call = call.function %}{%- endif %}"
        '{{- \'\n{"name": "\' ~ call.name ~ \'", "arguments": \' }}'
        "{{- call.arguments | tojson(indent=2) }}{{- '}' }}{%- endfor %}"
        "{%- else %}{{- '\n' + m.role + ' ' + m.content }}{%- endif %}{%- endfor %}"
    ),
    "macros, loops that end and dates": (
        "{% macro turn(m, first=false) %}{{ '#' if first }}{{ m.role[0] }}="
        "{{ m.content | default('-') }};{% endmacro %}{{ strftime_now('%d %b %Y') }} "
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{{ turn(m, loop.first) }}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}"
    ),
    "reasoning": (
        "{% for m in messages %}{% if m.reasoning_content is defined %}<think>"
        "{{ m.reasoning_content }}|{{ m.thinking }}</think>{% endif %}{{ m.content }}\n{% endfor %}"
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    ),
    "marks and filters": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{{ eos_token }}{% endgeneration %}{% else %}{{ m | items | list | length }}"
        "{{ m.content | replace('i', 'j') | length }}{% endif %}\n{% endfor %}"
        "{{ messages | map(attribute='role') | join(',') }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
        "{{ dict(a=1) }}{{ 'x' * 3 }}{{ 2 ** 3 }}"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("templates")

    def folder(name: str) -> Path:
        path = root / str(list(TEMPLATES).index(name))
        if not path.exists():
            whole = transformers.PreTrainedTokenizerFast(
                tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()),
                bos_token="<s>",
                eos_token="</s>",
                chat_template=TEMPLATES[name],
            )
            whole.save_pretrained(path)
        return path

    return folder


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_is_transformers(made: Any, name: str) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(made(name))
    ours = FolderTokenizer(made(name))
    compared = 0
    for talk in TALKS:
        for prompt in (True, False):
            for tools in (None, TOOLS):
                try:
                    expected = theirs.apply_chat_template(
                        talk, tools=tools, tokenize=False, add_generation_prompt=prompt,
                        enable_thinking=False,
                    )  # fmt: skip
                except Exception:
                    continue  # this template takes no tool calls
                variables = {"enable_thinking": False}
                found = ours.render(talk, prompt=prompt, tools=tools, variables=variables)
                assert found == expected
                compared += 1
    assert compared >= 8
