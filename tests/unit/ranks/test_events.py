"""What ranks say: JSON through a pipe, text to a terminal."""

from __future__ import annotations

import io
import json
import os
import signal

import pytest

from tutti.ranks.events import PIPE, PipeEvents, TextEvents, event_text, open_events

STEP = {"step": 3, "loss": 2.34567, "tokens_per_s": 12345.6, "mfu": 0.4321, "seconds": 0.5}


def test_events_are_lines_of_json() -> None:
    reading, writing = os.pipe()
    events = PipeEvents(writing)
    events.send("say", text="one\ntwo")
    events.send("step", **STEP)
    events._file.close()
    with os.fdopen(reading, encoding="utf-8") as pipe:
        first, second = map(json.loads, pipe.read().splitlines())
    assert first == {"kind": "say", "text": "one\ntwo"}
    assert second == {"kind": "step", **STEP}


def test_a_reader_that_has_gone_stops_nobody() -> None:
    reading, writing = os.pipe()
    before = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    events = PipeEvents(writing)
    os.close(reading)
    try:
        events.send("say", text="into the void")
        events.send("say", text="again")
    finally:
        with pytest.raises(BrokenPipeError):
            events._file.close()
        signal.signal(signal.SIGPIPE, before)


def test_on_a_terminal_rank_0_speaks_and_errors_come_from_all() -> None:
    stream = io.StringIO()
    for rank in (0, 1):
        events = TextEvents(rank, stream)
        events.send("step", **STEP)
        events.send("validation", step=3, loss=2.5)
        events.send("error", text=f"rank {rank} fell over")
        events.send("done", steps=3)
    assert stream.getvalue().splitlines() == [
        "step 3 · loss 2.3457 · 12,346 tokens/s · MFU 43.2% · 0.500 s",
        "step 3 · validation loss 2.5000",
        "rank 0 fell over",
        "rank 1 fell over",
    ]


def test_nothing_is_said_of_what_nobody_knows() -> None:
    assert event_text("done", {"steps": 3}) == ""


def test_the_starter_says_where_events_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PIPE, raising=False)
    assert isinstance(open_events(0), TextEvents)
    reading, writing = os.pipe()
    monkeypatch.setenv(PIPE, str(writing))
    opened = open_events(0)
    assert isinstance(opened, PipeEvents)
    opened._file.close()
    os.close(reading)
