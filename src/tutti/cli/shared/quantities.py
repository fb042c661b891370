"""Quantities with units, as options give them."""

from __future__ import annotations


def bytes_of(option: str, text: str) -> int:
    """Return the bytes that an option names: '4 GiB'."""
    from tutti.errors import InputError
    from tutti.units import parse

    try:
        return int(parse(text, "bytes"))
    except ValueError as error:
        raise InputError(f"{option} {error}") from None
