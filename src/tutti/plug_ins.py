"""Modules of others that add to tutti: found by entry points or the environment, imported once.

Importing the module is all that happens here; it calls the `register` or `add_…` that it needs.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points

from tutti.errors import InputError


def load(group: str, variable: str) -> None:
    """Import what installed packages name in a group of entry points, and a variable's modules."""
    for entry in entry_points(group=group):
        _imported(f"entry point '{entry.name}' of {group}", entry.load)
    for name in filter(None, (part.strip() for part in os.environ.get(variable, "").split(","))):
        _imported(f"{variable}: module '{name}'", functools.partial(import_module, name))


def reason(error: BaseException) -> str:
    """Return an error of someone else's code in one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _imported(what: str, load: Callable[[], object]) -> None:
    try:
        load()
    except (Exception, SystemExit) as error:  # another's package may fail in any way
        raise InputError(
            f"{what} cannot be imported ({reason(error)}); mend it or remove it"
        ) from error
