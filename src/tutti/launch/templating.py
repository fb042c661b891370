"""Templates of launch files: where they lie, and how a value is quoted for its language."""

from __future__ import annotations

import functools
import json
import re
import shlex
import textwrap
from collections.abc import Iterable

import jinja2
import yaml

_WIDTH = 88
_PLAIN = re.compile(r"[A-Za-z/]([\w./:-]*[\w/])?", re.ASCII)


def render(template: str, **values: object) -> str:
    """Return a template of this package with its values filled in."""
    return _environment().get_template(template).render(**values)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tutti.launch"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # these are no web pages; each language has a filter below
    )
    environment.filters |= {"sh": shlex.quote, "yaml": yaml_scalar, "block": block, "rows": rows}
    environment.filters["lines"] = lines
    return environment


def yaml_scalar(value: object) -> str:
    """Return a value as YAML reads it: a plain word as it is, all else as JSON, which is YAML."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and yaml.safe_load(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)


def block(text: str, indent: int) -> str:
    """Return a text as a YAML block where that keeps every character, else as one quoted line."""
    lines = text.splitlines()
    plain = all(line.isprintable() and line == line.rstrip() for line in lines)
    if not lines or not plain or lines[0].startswith(" ") or text != "\n".join(lines) + "\n":
        return yaml_scalar(text)
    return "|\n" + textwrap.indent(text.removesuffix("\n"), " " * indent)


def rows(words: Iterable[str], indent: int) -> str:
    """Return words as lines that are not too long."""
    space = " " * indent
    return textwrap.fill(
        " ".join(words),
        _WIDTH,
        initial_indent=space,
        subsequent_indent=space,
        break_long_words=False,
        break_on_hyphens=False,
    )


def lines(text: str, indent: int) -> str:
    """Return lines further to the right, each with its end; nothing for no lines."""
    return "".join(" " * indent + line + "\n" for line in text.splitlines() if line.strip())
