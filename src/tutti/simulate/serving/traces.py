"""Workload files: a description in YAML or JSON, or a trace of requests in CSV or JSON lines.

Known traces are told by their columns: Mooncake (`timestamp` in ms, `input_length`,
`output_length`, `hash_ids`), Azure (`TIMESTAMP`, `ContextTokens`, `GeneratedTokens`), BurstGPT
(`Timestamp` in s, `Request tokens`, `Response tokens`), ShareGPT (`conversations`), and tutti's own
(`time_s`, `prompt`, `output`).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tutti.document import Place, build
from tutti.errors import InputError
from tutti.files import parse_json, parse_yaml, read_text
from tutti.plan.serving import Limits, Service
from tutti.simulate.serving.requests import MOST_REQUESTS, Requests, draw, summed_up

CHARACTERS_PER_TOKEN = 4.0  # of English text; ShareGPT has texts, no token counts


class _Columns(NamedTuple):
    """A kind of trace: its name, its columns, and how many of its time units a second is."""

    name: str
    time: str
    prompt: str
    output: str
    per_second: float = 1.0


KINDS = (
    _Columns("tutti", "time_s", "prompt", "output"),
    _Columns("Mooncake", "timestamp", "input_length", "output_length", 1000.0),
    _Columns("Azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    _Columns("BurstGPT", "Timestamp", "Request tokens", "Response tokens"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a workload file says: the description, and the requests themselves if it is a trace."""

    service: Service
    trace: Requests | None = None

    def requests(self, count: int | None, seed: int = 0) -> Requests:
        """Return the trace, or its first requests; or as many drawn ones (1,000)."""
        if self.trace is None:
            return draw(self.service.traffic, 1000 if count is None else count, seed)
        return self.trace if count is None else self.trace.first(count)


def load_workload(path: Path) -> Workload:
    """Read a workload file by its ending."""
    if path.suffix in (".csv", ".jsonl"):
        trace = read_trace(path)
        return Workload(
            service=Service(traffic=summed_up(trace, path.name), limits=Limits()), trace=trace
        )
    text = read_text(path)
    if path.suffix == ".json":
        value = parse_json(text, path.name)
        if isinstance(value, list):
            trace = _sharegpt(value, path.name)
            return Workload(
                service=Service(traffic=summed_up(trace, path.name), limits=Limits()), trace=trace
            )
    else:
        value = parse_yaml(text, path.name)
    return Workload(service=build(Service, value, Place(path.name)))


def read_trace(path: Path) -> Requests:
    """Read requests from CSV or JSON lines."""
    rows = _csv(path) if path.suffix == ".csv" else _lines(path)
    if not rows:
        raise InputError(f"{path.name}: has no requests")
    if len(rows) > MOST_REQUESTS:
        raise InputError(f"{path.name}: {len(rows):,} requests; at most {MOST_REQUESTS:,} are read")
    if "conversations" in rows[0]:
        return _sharegpt(rows, path.name)
    kind = _kind(rows[0], path.name)
    times = np.array([_time(row, kind, path.name, i) for i, row in enumerate(rows, 1)])
    if (np.diff(times) < 0).any():
        where = int(np.argmax(np.diff(times) < 0)) + 2
        raise InputError(f"{path.name}: request {where}: arrives before the one above; sort them")
    columns = [
        np.array([_tokens(row, name, path.name, i) for i, row in enumerate(rows, 1)], np.int64)
        for name in (kind.prompt, kind.output)
    ]
    blocks = tuple(tuple(map(int, row.get("hash_ids") or ())) for row in rows)
    named = any(blocks) and kind.name == "Mooncake"
    return Requests(
        times=times - times[0],
        prompts=columns[0],
        outputs=columns[1],
        blocks=blocks if named else (),
    )


def _csv(path: Path) -> list[Mapping[str, Any]]:
    return list(csv.DictReader(read_text(path).splitlines()))


def _lines(path: Path) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path.name}: line {number}: is no JSON ({error})") from None
        if not isinstance(row, dict):
            raise InputError(f"{path.name}: line {number}: expected an object per line")
        rows.append(row)
    return rows


def _kind(row: Mapping[str, Any], file: str) -> _Columns:
    best, missing = KINDS[0], [*KINDS[0][1:4]]
    for kind in KINDS:
        lacks = [name for name in kind[1:4] if name not in row]
        if not lacks:
            return kind
        if len(lacks) < len(missing):
            best, missing = kind, lacks
    has = ", ".join(str(name) for name in list(row)[:8])
    raise InputError(
        f"{file}: lacks the column '{missing[0]}' of a trace of {best.name}; it has {has}; known "
        f"traces: {', '.join(kind.name for kind in KINDS)}, ShareGPT"
    )


def _time(row: Mapping[str, Any], kind: _Columns, file: str, number: int) -> float:
    value = row.get(kind.time)
    try:
        seconds = float(value) / kind.per_second  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = _stamp(str(value), kind, file, number)
    if not 0 <= seconds < float("inf"):
        raise InputError(f"{file}: request {number}: '{kind.time}' is {value}; must be at least 0")
    return seconds


def _stamp(text: str, kind: _Columns, file: str, number: int) -> float:
    """Return a date and time as seconds; Azure's have seven digits behind the second."""
    head, dot, digits = text.partition(".")
    try:
        seconds = datetime.fromisoformat(head).timestamp()
        return seconds + (float(f"0.{digits}") if dot else 0.0)
    except ValueError:
        raise InputError(
            f"{file}: request {number}: '{kind.time}' is '{text}'; expected seconds or a date"
        ) from None


def _tokens(row: Mapping[str, Any], name: str, file: str, number: int) -> int:
    value = row.get(name)
    try:
        tokens = int(float(value))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise InputError(
            f"{file}: request {number}: '{name}' is '{value}'; expected tokens"
        ) from None
    if not 0 <= tokens < 2**28:
        raise InputError(f"{file}: request {number}: '{name}' is {tokens:,} tokens")
    return max(1, tokens)  # traces have failed requests without answer: one token


def _sharegpt(rows: list[Any], file: str) -> Requests:
    """Return the first question and answer of each conversation, all at once."""
    pairs = []
    for row in rows:
        turns = row.get("conversations") if isinstance(row, dict) else None
        if not isinstance(turns, list):
            raise InputError(f"{file}: lacks 'conversations', as a file of ShareGPT has them")
        texts = [str(turn.get("value", "")) for turn in turns[:2] if isinstance(turn, dict)]
        if len(texts) == 2:
            pairs.append([max(1, round(len(text) / CHARACTERS_PER_TOKEN)) for text in texts])
    if not pairs:
        raise InputError(f"{file}: has no conversation with a question and an answer")
    prompts, outputs = np.array(pairs, np.int64).T
    return Requests(times=np.zeros(len(pairs)), prompts=prompts, outputs=outputs)
