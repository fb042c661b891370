"""Traces of requests: a Chrome trace in a file, spans for OpenTelemetry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tutti.server.openai.tracing import RequestTimes, Tracing, spans_of, write_trace

TIMES = RequestTimes(
    parent={"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
    began=1_000_000,
    sent=3_000_000,
    pieces=[(5_000_000, 0, 1), (6_000_000, 1, 2)],
)


def test_the_parts_of_a_request_follow_each_other() -> None:
    assert spans_of(TIMES, 9_000_000) == [
        ("prepare", 1_000_000, 3_000_000),
        ("queue and prompt", 3_000_000, 5_000_000),
        ("answer", 5_000_000, 9_000_000),
    ]
    refused = RequestTimes(began=5)
    assert spans_of(refused, 8) == [("prepare", 5, 8)]


def test_a_chrome_trace(tmp_path: Path) -> None:
    write_trace(tmp_path / "cmpl-1.json", TIMES, 9_000_000, {"gen_ai.usage.input_tokens": 4})
    events = json.loads((tmp_path / "cmpl-1.json").read_text())["traceEvents"]
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    assert spans["request"]["dur"] == 8000.0
    assert spans["request"]["args"] == {"gen_ai.usage.input_tokens": 4}
    assert (spans["answer"]["ts"], spans["answer"]["dur"]) == (4000.0, 4000.0)
    marks = [(e["tid"], e["ts"], e["args"]["tokens"]) for e in events if e["ph"] == "i"]
    assert marks == [(1, 4000.0, 1), (2, 5000.0, 2)]


class Span:
    def __init__(self, name: str, context: Any, start_time: int) -> None:
        self.name, self.context, self.start, self.ended = name, context, start_time, 0

    def end(self, when: int) -> None:
        self.ended = when


class Tracer:
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def start_span(self, name: str, *, context: Any, start_time: int, **_more: Any) -> Span:
        self.spans.append(Span(name, context, start_time))
        return self.spans[-1]


def test_spans_hang_on_the_clients() -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    tracer = Tracer()
    Tracing(tracer=tracer).ended("cmpl-1", TIMES, {"id": "cmpl-1", "none": None})
    assert [span.name for span in tracer.spans] == [
        "request", "prepare", "queue and prompt", "answer"
    ]  # fmt: skip
    whole, *parts = tracer.spans
    above = trace.get_current_span(whole.context).get_span_context()
    assert f"{above.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert all(whole in part.context.values() for part in parts)
    assert whole.ended >= parts[-1].ended


def test_a_trace_that_cannot_be_written_fails_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Tracing(str(tmp_path / "gone")).ended("cmpl-1", TIMES, {})
    assert "a request's trace is lost" in caplog.text


def test_nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_EXPORTER"):
        monkeypatch.delenv(name, raising=False)
    assert not Tracing().is_on
