"""What a rank tells whoever started it: JSON lines through a pipe, or text to a terminal."""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Protocol, TextIO

PIPE = "TUTTI_EVENTS"  # the file descriptor that a rank's events go to


class Events(Protocol):
    """Takes events; a `kind` and what belongs to it."""

    def send(self, kind: str, **values: object) -> None:
        """Tell one."""


class PipeEvents:
    """One JSON object per line, written whole."""

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "w", buffering=1, encoding="utf-8")
        self._lock = threading.Lock()

    def send(self, kind: str, **values: object) -> None:
        """Write a line; a reader that has gone is no reason to stop."""
        line = json.dumps({"kind": kind, **values}) + "\n"
        try:
            with self._lock:
                self._file.write(line)
        except (BrokenPipeError, ValueError):
            return


class TextEvents:
    """What a person reads when torchrun started the ranks: rank 0 speaks, errors from all."""

    def __init__(self, rank: int, stream: TextIO | None = None) -> None:
        self._rank, self._stream = rank, stream or sys.stderr

    def send(self, kind: str, **values: object) -> None:
        """Print what matters."""
        text = event_text(kind, values)
        if kind == "stranger":  # the log, which is the terminal here, has it already
            return
        if text and (self._rank == 0 or kind == "error"):
            self._stream.write(text + "\n")
            self._stream.flush()


def event_text(kind: str, values: dict[str, object]) -> str:
    """Return an event as a line for people; empty where there is nothing to say."""
    if kind == "step":
        parts = [f"step {values['step']}", f"loss {values['loss']:.4f}"]
        if values.get("right") is not None:
            parts.append(f"right {values['right']:.0%}")
        parts.append(f"{values['tokens_per_s']:,.0f} tokens/s")
        parts.append(f"MFU {values['mfu']:.1%}")
        parts.append(f"{values['seconds']:.3f} s")
        return " · ".join(parts)
    if kind == "validation":
        return f"step {values['step']} · validation loss {values['loss']:.4f}"
    if kind in ("say", "notice", "error", "warning", "stranger"):
        return str(values["text"])
    return ""


def open_events(rank: int) -> Events:
    """Return where this process's events go."""
    descriptor = os.environ.get(PIPE, "")
    return PipeEvents(int(descriptor)) if descriptor else TextEvents(rank)
