"""The skeleton of every page: head, header, sections, scripts, data, all in one file.

The content-security policy forbids every request, so that a page which would need the network
fails in the tests, and a page from a stranger can do nothing behind its reader's back.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from tutti.files import write_text
from tutti.report.binary import Pack


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of a page with a heading.

    `scripts` names the assets that it needs; `data` is handed to them under the section's id.
    """

    id: str
    heading: str
    body: str  # HTML
    intro: str = ""  # plain text
    scripts: tuple[str, ...] = ()
    data: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One self-contained document."""

    title: str
    subtitle: str = ""
    sections: tuple[Section, ...] = ()
    arrays: Pack = field(default_factory=Pack)
    footer: str = ""

    def html(self) -> str:
        """Return the whole document."""
        script = self._script()
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy = (
            f"default-src 'none'; script-src 'sha256-{digest}'; "
            "style-src 'unsafe-inline'; img-src data:"
        )
        body = "\n".join(map(_section, self.sections))
        return (
            f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<meta name="color-scheme" content="light dark">\n'
            '<meta name="generator" content="tutti">\n'
            f'<title>{escape(self.title)}</title>\n<link rel="icon" href="data:,">\n'
            f"<style>\n{asset('page.css')}</style>\n</head>\n<body>\n"
            f"<header><h1>{escape(self.title)}</h1><p>{escape(self.subtitle)}</p></header>\n"
            f"<main>\n{body}\n</main>\n<footer>{escape(self.footer)}</footer>\n"
            f'<div id="tip" role="status" hidden></div>\n{self._data()}'
            f"<script>{script}</script>\n</body>\n</html>\n"
        )

    def _script(self) -> str:
        names = dict.fromkeys(name for section in self.sections for name in section.scripts)
        return "\n".join(asset(name) for name in ("core.js", *names, "start.js")) if names else ""

    def _data(self) -> str:
        """Return the data blocks, which the browser does not execute."""
        values = {
            "arrays": self.arrays.directory,
            "parts": {s.id: dict(s.data) for s in self.sections if s.scripts},
        }
        text = json.dumps(values, separators=(",", ":"), ensure_ascii=False)
        return (
            f'<script type="application/json" id="values">{inert(text)}</script>\n'
            f'<script type="text/plain" id="arrays">{self.arrays.text()}</script>\n'
        )

    def write(self, path: Path) -> None:
        """Write the page as a whole or not at all."""
        write_text(path, self.html())


def escape(text: str) -> str:
    """Return plain text as HTML."""
    return html.escape(text, quote=True)


def inert(text: str) -> str:
    """Keep a name inside JSON from closing its script element."""
    return text.replace("<", "\\u003c")


def _section(section: Section) -> str:
    intro = f'<p class="intro">{escape(section.intro)}</p>' if section.intro else ""
    heading = f"<h2>{escape(section.heading)}</h2>" if section.heading else ""
    return f'<section id="{escape(section.id)}">{heading}{intro}\n{section.body}\n</section>'


def asset(name: str) -> str:
    """Return a script or a style that ships with the package."""
    return (resources.files("tutti.report") / "assets" / name).read_text(encoding="utf-8")
