"""Loops that numba compiles: loaded when first needed, kept on disk where there is a place."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any


def has_numba() -> bool:
    """Tell whether numba is installed."""
    return importlib.util.find_spec("numba") is not None


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loop compiled, from the cache on disk where there is a place for one."""
    njit = importlib.import_module("numba").njit
    try:
        return njit(cache=True, nogil=True)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # no folder that the cache could lie in
        return njit(nogil=True)(function)  # type: ignore[no-any-return]
