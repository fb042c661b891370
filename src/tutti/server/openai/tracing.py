"""What became of a request, when: a span tree for OpenTelemetry, a Chrome trace in a file.

Spans are made where opentelemetry's SDK is installed and told where to send them
(OTEL_EXPORTER_OTLP_ENDPOINT, or OTEL_TRACES_EXPORTER=console); a `traceparent` header is their
parent. Chrome traces are written to the folder of `--trace-requests`.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

log = logging.getLogger("tutti.server")
MOST_FILES = 10_000  # of a folder; later requests leave none
MOST_PIECES = 4_096  # of a request that are told one by one
ASKED = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


@dataclass(slots=True)
class RequestTimes:
    """The times of one request, in ns since 1970."""

    parent: Mapping[str, str] = field(default_factory=dict)  # headers
    began: int = field(default_factory=time.time_ns)
    sent: int = 0  # to an engine
    pieces: list[tuple[int, int, int]] = field(default_factory=list)  # when, sample, tokens

    def piece(self, sample: int, tokens: int) -> None:
        """Take note of tokens that came."""
        if tokens and len(self.pieces) < MOST_PIECES:
            self.pieces.append((time.time_ns(), sample, tokens))


def spans_of(times: RequestTimes, ended: int) -> list[tuple[str, int, int]]:
    """Return the parts of a request: name, begin and end."""
    sent = times.sent or ended
    spans = [("prepare", times.began, sent)]
    if times.sent:
        first = times.pieces[0][0] if times.pieces else ended
        spans.append(("queue and prompt", sent, first))
        if times.pieces:
            spans.append(("answer", first, ended))
    return spans


class Tracing:
    """Writes and sends what requests took; does nothing where nobody asked for it."""

    def __init__(self, folder: str = "", tracer: Any = None) -> None:
        self._folder = Path(folder) if folder else None
        self._written = 0
        self._tracer = tracer if tracer is not None else _tracer()

    @property
    def is_on(self) -> bool:
        """Whether anybody wants to know."""
        return self._folder is not None or self._tracer is not None

    def ended(self, name: str, times: RequestTimes, facts: Mapping[str, Any]) -> None:
        """Tell of a request that is over; what cannot be told is logged, and fails nothing."""
        ended = time.time_ns()
        try:
            if self._folder is not None and self._written < MOST_FILES:
                self._written += 1
                write_trace(self._folder / f"{name}.json", times, ended, facts)
            if self._tracer is not None:
                self._send(times, ended, facts)
        except Exception as error:  # of a disk, or an exporter
            log.warning("a request's trace is lost: %s", error)

    def _send(self, times: RequestTimes, ended: int, facts: Mapping[str, Any]) -> None:
        from opentelemetry import propagate, trace

        above = propagate.extract(dict(times.parent))
        attributes = {key: value for key, value in facts.items() if value is not None}
        kind = trace.SpanKind.SERVER
        whole = self._tracer.start_span(
            "request", context=above, kind=kind, start_time=times.began, attributes=attributes
        )
        within = trace.set_span_in_context(whole)
        for name, begin, end in spans_of(times, ended):
            self._tracer.start_span(name, context=within, start_time=begin).end(end)
        whole.end(ended)


def write_trace(path: Path, times: RequestTimes, ended: int, facts: Mapping[str, Any]) -> None:
    """Write a request as a Chrome trace: its parts, and when tokens came."""

    def at(when: int) -> float:
        return (when - times.began) / 1e3  # µs

    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": path.stem}},
        {"ph": "X", "name": "request", "pid": 0, "tid": 0, "ts": 0.0, "dur": at(ended),
         "args": dict(facts)},
    ]  # fmt: skip
    for name, begin, end in spans_of(times, ended):
        events.append(
            {
                "ph": "X",
                "name": name,
                "pid": 0,
                "tid": 0,
                "ts": at(begin),
                "dur": (end - begin) / 1e3,
            }
        )
    for when, sample, tokens in times.pieces:
        args = {"tokens": tokens}
        events.append(
            {"ph": "i", "s": "t", "name": "tokens", "pid": 0, "tid": 1 + sample, "ts": at(when),
             "args": args}
        )  # fmt: skip
    path.write_text(json.dumps({"traceEvents": events}, separators=(",", ":")), encoding="utf-8")


def _tracer() -> Any:
    """Return opentelemetry's, where it is installed and was told where to send spans."""
    console = os.environ.get("OTEL_TRACES_EXPORTER", "") == "console"
    if not console and not any(os.environ.get(name) for name in ASKED):
        return None
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

        exporter: Any = ConsoleSpanExporter()
        if not console:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter()
    except ImportError as error:
        log.warning("no spans are sent (%s); pip install opentelemetry-sdk and an exporter", error)
        return None
    name = os.environ.get("OTEL_SERVICE_NAME", "tutti")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return trace.get_tracer("tutti.server")
