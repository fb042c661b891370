"""Standard streams that take whatever is written: any encoding, closed, or a pipe that has gone.

A character that the terminal's encoding lacks is written in ASCII. A stream that was closed before
the command began (`>&-`) is the null device: left closed, its number would go to the next file.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
import unicodedata

HANDLER = "tutti_ascii"
# What stands for a character that an encoding lacks; others lose their accents, or become "?".
_PLAIN = {
    "·": "-", "…": "...", "×": "x", "−": "-", "–": "-", "—": "-", "→": "->", "←": "<-", "↔": "<->",
    "÷": "/", "≤": "<=", "≥": ">=", "Σ": "sum", "‖": "||", "“": '"', "”": '"', "‘": "'", "’": "'",
    "•": "*", "µ": "u", "μ": "u", "√": "sqrt ", "±": "+-", "✓": "ok", "✗": "x", "∞": "inf",
    "α": "alpha", "β": "beta", "λ": "lambda", "§": "section ", "≈": "~", "►": ">", "◄": "<",
}  # fmt: skip
_BLOCKS = "▁▂▃▄▅▆▇█"
_HEIGHTS = "_..--==#"  # as many, from low to high


def plain(character: str) -> str:
    """Return a character in ASCII."""
    if character in _PLAIN:
        return _PLAIN[character]
    if character in _BLOCKS:
        return _HEIGHTS[_BLOCKS.index(character)]
    name = unicodedata.name(character, "")
    if name.startswith("BOX DRAWINGS"):
        across, down = "HORIZONTAL" in name, "VERTICAL" in name
        return "|" if down and not across else "-" if across and not down else "+"
    if name.startswith(("BLOCK", "BLACK", "WHITE", "BRAILLE")) or "BLOCK" in name:
        return "*"
    kept = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return kept or "?"


def _replaced(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(plain, error.object[error.start : error.end])), error.end


def prepare() -> None:
    """Make the three standard streams safe to write to."""
    codecs.register_error(HANDLER, _replaced)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            _fill(number)
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    codecs.register(_ascii)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # a test's or an editor's own stream
            known = codecs.lookup(stream.encoding).name
            stream.reconfigure(  # type: ignore[union-attr]
                errors=HANDLER, encoding=HANDLER if known == "ascii" else None
            )


def _ascii(name: str) -> codecs.CodecInfo | None:
    """ASCII by another name: where the library of the command line sees "ascii" it writes UTF-8."""
    if name != HANDLER:
        return None
    ascii_codec = codecs.lookup("ascii")
    return codecs.CodecInfo(
        ascii_codec.encode, ascii_codec.decode, ascii_codec.streamreader, ascii_codec.streamwriter,
        ascii_codec.incrementalencoder, ascii_codec.incrementaldecoder, name=HANDLER,
    )  # fmt: skip


def _fill(number: int) -> None:
    """Put the null device in the place of a closed stream, unless the number is in use."""
    try:
        os.fstat(number)
    except OSError:
        null = os.open(os.devnull, os.O_RDWR)
        if null != number:
            os.dup2(null, number)
            os.close(null)


def discard_output() -> None:
    """Write nothing more to standard output: who read it has gone, or its disk is full."""
    null = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):
        os.dup2(null, sys.stdout.fileno())
    os.close(null)


def can_show(text: str) -> bool:
    """Tell whether standard output has every character of a text."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
