"""The errors that tutti answers instead of a stack trace.

`TuttiError` is anything a person can act on; `InputError` is a file or an argument that is wrong.
The command line prints the message alone and exits with `exit_code`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TuttiError(Exception):
    """A failure that is explained by its message; no traceback is shown for it."""

    exit_code = 1


class StoppedError(TuttiError):
    """Ctrl-C came before there was anything to show."""

    exit_code = 130


class InputError(TuttiError):
    """A file, an option or a value given by the user is wrong.

    The message quotes what the user gave; line breaks and control characters in it are escaped, so
    that it stays one line.
    """

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(
            "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
        )


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known name that `word` was most likely meant to be, if one is close."""
    names = list(known)
    by_folded = {name.casefold(): name for name in names}
    folded = word.casefold()
    if folded in by_folded:
        return by_folded[folded]
    close = difflib.get_close_matches(folded, list(by_folded), n=1, cutoff=0.6)
    return by_folded[close[0]] if close else None


def hint(word: str, known: Iterable[str], *, most: int = 12) -> str:
    """Return "did you mean 'x'?" or, if nothing is close, the list of known names."""
    names = sorted(set(known))
    guess = nearest(word, names)
    if guess is not None:
        return f"did you mean '{guess}'?"
    if not names:
        return "none are known here"
    shown = ", ".join(names[:most])
    return f"known: {shown}" + (f", … ({len(names)} in all)" if len(names) > most else "")
