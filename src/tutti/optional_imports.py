"""Libraries that only some kinds of data need, imported when they are, or one line about it."""

from __future__ import annotations

import importlib
from types import ModuleType

from tutti.errors import InputError

_EXTRAS = {
    "pyarrow": "data",
    "tokenizers": "huggingface",
    "transformers": "huggingface",
    "jinja2": "huggingface",
    "fastapi": "serve",
    "starlette": "dashboard",
    "uvicorn": "serve",
    "httptools": "serve",
    "zmq": "serve",
    "msgspec": "serve",
    "prometheus_client": "serve",
    "llguidance": "serve",
    "httpx": "serve",
    "fsspec": "storage",
}


def library(name: str, what: str, extra: str | None = None) -> ModuleType:
    """Import a library, or say what needs it and how to get it; several extras may have it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise InputError(
            f"{what}: needs {package}, which is not installed; "
            f"run pip install 'tutti-ml[{extra or _EXTRAS[package]}]'"
        ) from None
