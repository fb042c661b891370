"""Chat templates: conversations as text, by the Jinja template that a folder brings.

A template is a program that somebody else wrote. It runs in Jinja's sandbox, sees nothing but plain
values (text, numbers, lists, mappings), and gets the functions that templates rely on and no
others. It has the variables that transformers gives: messages, tools, documents,
add_generation_prompt, the named special tokens, and whatever the caller adds.
"""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Cycler, Joiner, Namespace

from tutti.errors import InputError

TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the same, first known first
_MOST_REPEATED = 1_000_000  # characters or items that a product may make
Span = tuple[int, int]


class TemplateRefusedError(InputError):
    """A template that cannot be read, or that does not take a conversation."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: the chat template refuses the conversation ({reason})")
        self.reason = reason


class ChatTemplate:
    """The templates of one folder: one, or several by name."""

    def __init__(self, sources: Mapping[str, str], tokens: Mapping[str, str], place: str) -> None:
        self._sources, self._tokens, self._place = dict(sources), dict(tokens), place

    @classmethod
    def of_folder(cls, folder: Path, settings: Mapping[str, Any]) -> ChatTemplate | None:
        """Return a folder's template; `settings` are those of its tokenizer."""
        sources = _files(folder) or _given(settings.get("chat_template"))
        if not sources:
            return None
        named = {key: _content(settings.get(key)) for key in TOKENS}
        tokens = {key: text for key, text in named.items() if text is not None}
        return cls(sources, tokens, str(folder))

    @property
    def text(self) -> str:
        """The template for conversations with tools."""
        return self._source(tools=True)

    @property
    def marks(self) -> bool:
        """Whether it marks what the assistant says (`{% generation %}`)."""
        blocks = _parsed(self._source(tools=False), self._place).find_all(nodes.CallBlock)
        return any(isinstance(block.call.node, nodes.ExtensionAttribute) for block in blocks)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a conversation as text; with `prompt`, up to where the assistant's turn begins."""
        return self.spans(messages, prompt=prompt, tools=tools, variables=variables)[0]

    def spans(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[Span]]:
        """Return a conversation as text, and the characters that the template marks."""
        template = _compiled(self._source(tools=tools is not None), self._place)
        seen = {
            "messages": [_message(one) for one in _plain(messages, self._place)],
            "tools": _plain(tools, self._place),
            "documents": None,
            "add_generation_prompt": prompt,
            **self._tokens,
            **_plain(variables or {}, self._place),
        }
        try:
            text = template.render(**seen)
        except Exception as error:  # a template may raise anything, and says why in its message
            raise TemplateRefusedError(self._place, _reason(error)) from None
        return _without_marks(text)

    def _source(self, *, tools: bool) -> str:
        names = ("tool_use", "default") if tools else ("default",)
        for name in names:
            if name in self._sources:
                return self._sources[name]
        raise InputError(
            f"{self._place}: has the chat templates {', '.join(sorted(self._sources))}, and none "
            "is called 'default'"
        )


# --- where templates are -------------------------------------------------------------------


def _files(folder: Path) -> dict[str, str]:
    """Return templates in files of their own, which go before those in settings."""
    paths = {"default": folder / "chat_template.jinja"}
    paths |= {p.stem: p for p in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    texts = {}
    for name, path in paths.items():
        if path.is_file():
            try:
                texts[name] = path.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise InputError(f"{path}: cannot be read ({error})") from None
    return texts


def _given(value: object) -> dict[str, str]:
    """Return templates as tokenizer_config.json has them: a text, or several with names."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {
            str(one.get("name")): str(one.get("template"))
            for one in value
            if isinstance(one, Mapping) and "template" in one
        }
    return {}


def _content(value: object) -> str | None:
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else None


# --- what a template sees ------------------------------------------------------------------


def _plain(value: Any, place: str) -> Any:
    """Return a copy made of text, numbers, lists and mappings; objects have methods to reach."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, place) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_plain(item, place) for item in value]
    raise InputError(
        f"{place}: a conversation holds a {type(value).__name__}; it is made of text, numbers, "
        "lists and mappings"
    )


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without what is None, and its reasoning under the names in use."""
    said = {key: value for key, value in message.items() if value is not None}
    reasoning = next((said[key] for key in _REASONING if key in said), None)
    if reasoning is None:
        return said
    return {"thinking": reasoning, **said, "reasoning_content": reasoning}


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# --- the sandbox ---------------------------------------------------------------------------

_NONCE = secrets.token_hex(8)  # nobody can write a mark into a message
_OPEN, _CLOSE = f"\0<{_NONCE}\0", f"\0>{_NONCE}\0"


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}`: what the assistant says."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own way)

    def parse(self, parser: Parser) -> nodes.Node:
        """Turn the block into a call that puts marks around it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


def _without_marks(text: str) -> tuple[str, list[Span]]:
    """Return the text without marks, and what stood between them."""
    parts, spans, at = [], [], 0
    for number, part in enumerate(text.split(_OPEN)):
        said, closed, rest = part.partition(_CLOSE)
        if number and closed:
            spans.append((at, at + len(said)))
        parts += [said, rest]
        at += len(said) + len(rest)
    return "".join(parts), spans


class _Names(Namespace):
    """Jinja's namespace without names that Python gives a meaning."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a value may be called 'self'
        values = dict(*args[1:], **kwargs)
        for name in values:
            _Names._check(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _Names._check(name)
        Namespace.__setitem__(self, name, value)

    @staticmethod
    def _check(name: object) -> None:
        if not isinstance(name, str) or name.startswith("_"):
            raise SecurityError(f"a namespace has no place for {name!r}")


class _Sandbox(ImmutableSandboxedEnvironment):
    """No attribute with an underscore, no change of a value, no product without measure."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Multiply, within limits."""
        if operator == "**" and (abs(left) > _MOST_REPEATED or abs(right) > 64):
            raise SecurityError("a power beyond measure")
        for one, other in ((left, right), (right, left)):
            repeats = isinstance(one, str | list | tuple) and isinstance(other, int)
            if repeats and len(one) * other > _MOST_REPEATED:
                raise SecurityError("a repetition beyond measure")
        return super().call_binop(context, operator, left, right)


def _refuse(message: str) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def _now(format: str) -> str:  # noqa: A002  (templates may name it)
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=None if separators is None else tuple(separators),  # type: ignore[arg-type]
        sort_keys=sort_keys,
    )


def _mapping(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


@functools.cache
def _environment() -> _Sandbox:
    sandbox = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    sandbox.filters["tojson"] = _to_json
    sandbox.globals = {
        "range": safe_range,
        "dict": _mapping,
        "namespace": _Names,
        "cycler": Cycler,
        "joiner": Joiner,
        "raise_exception": _refuse,
        "strftime_now": _now,
    }
    return sandbox


@functools.lru_cache(maxsize=16)
def _compiled(source: str, place: str) -> jinja2.Template:
    _parsed(source, place)
    return _environment().from_string(source)


@functools.lru_cache(maxsize=16)
def _parsed(source: str, place: str) -> nodes.Template:
    try:
        return _environment().parse(source)
    except jinja2.exceptions.TemplateSyntaxError as error:
        raise InputError(
            f"{place}: the chat template cannot be read (line {error.lineno}: {error.message})"
        ) from None
