"""The page of the dashboard: live, where it asks the server; saved, where all is in one file."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from importlib import resources

from tutti.report.page import asset, escape, inert
from tutti.web.watched import Document

_SCRIPTS = (
    "vendor/htm-preact.js", "vendor/uplot.js",
    "format.js", "source.js", "chart.js", "heat.js", "drawings.js", "elastic.js",
    "views.js", "main.js",
)  # fmt: skip
_LIVE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def _own(name: str) -> str:
    return (resources.files("tutti.web") / "assets" / name).read_text(encoding="utf-8")


@functools.cache
def script() -> str:
    """Return all scripts as one: of the vendors, of the pages of `report`, and our own."""
    drawn = [asset(name) for name in ("core.js", "cluster.js", "gantt.js")]
    vendors, own = _SCRIPTS[:2], _SCRIPTS[2:]
    return "\n;".join([*map(_own, vendors), *drawn, *map(_own, own)])


@functools.cache
def style() -> str:
    """Return all styles as one."""
    return asset("page.css") + _own("vendor/uplot.css") + _own("dashboard.css")


def policy() -> str:
    """Return the content-security policy of the live page: nothing from outside."""
    return _LIVE_POLICY


def live_page() -> str:
    """Return the page that asks the server for everything."""
    return _page(
        "tutti dashboard",
        head='<link rel="stylesheet" href="app.css">',
        tail='<script src="app.js"></script>',
    )


def saved_page(title: str, documents: Document, start: str, at: float) -> str:
    """Return a page that is complete in itself: documents by their keys, and where it begins."""
    values = json.dumps(
        {"documents": documents, "start": start, "at": at}, separators=(",", ":"),
        ensure_ascii=False,
    )  # fmt: skip
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    rules = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return _page(
        title,
        head=f'<meta http-equiv="Content-Security-Policy" content="{rules}">'
        f"<style>{style()}</style>",
        tail=f'<script type="application/json" id="saved">{inert(values)}</script>'
        f"<script>{script()}</script>",
    )


def _page(title: str, head: str, tail: str) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"{head}\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="generator" content="tutti">\n'
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n</head>\n<body>\n'
        '<div id="app"></div>\n<div id="tip" role="status" hidden></div>\n'
        f"<noscript>This page draws itself with scripts.</noscript>\n{tail}\n</body>\n</html>\n"
    )
