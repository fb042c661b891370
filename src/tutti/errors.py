"""The errors that tutti answers instead of a stack trace, and the exit codes of every verb.

`TuttiError` is anything a person can act on; `InputError` is a file or an argument that is wrong.
The command line prints the message alone and exits with `exit_code`.
"""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable

EXIT_CODES = {
    0: "done",
    1: "failed while running: a rank died, numbers were not finite, a save failed, a check said no",
    2: "a file, an option or a value is wrong, or what is asked for does not fit",
    130: "stopped by Ctrl-C before its work was done",
    143: "stopped by SIGTERM before its work was done",
}
"""What a verb's exit code means; docs/reference/errors.md shows the same table."""


class TuttiError(Exception):
    """A failure that is explained by its message; no traceback is shown for it."""

    exit_code = 1


class StoppedError(TuttiError):
    """Somebody asked it to end before its work was done: Ctrl-C, or SIGTERM."""

    def __init__(self, message: str, by: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.exit_code = 128 + by  # as a shell says it of a process that a signal ended


class InputError(TuttiError):
    """A file, an option or a value given by the user is wrong, or its question has no answer.

    The message quotes what the user gave; line breaks and control characters in it are escaped, so
    that it stays one line.
    """

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(
            "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
        )


class DamagedError(InputError):
    """A file is no longer what was written; another copy of it may be whole."""


def error_with(exit_code: int, message: str) -> TuttiError:
    """Return the error of another process, by what it exits with."""
    if exit_code in (130, 143):
        return StoppedError(message, by=exit_code - 128)
    return InputError(message) if exit_code == 2 else TuttiError(message)


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
