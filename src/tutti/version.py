"""Which tutti this is."""

from __future__ import annotations

import importlib.metadata


def code_version() -> str:
    """Return the version that is installed; "source" where it runs from a folder."""
    try:
        return importlib.metadata.version("tutti-ml")
    except importlib.metadata.PackageNotFoundError:
        return "source"
