"""A run at HOST:PORT: what its Prometheus port says, kept for as long as it is watched."""

from __future__ import annotations

import re
import threading
import time
import urllib.error
import urllib.request
from collections import deque

import numpy as np

from tutti.diagnose.runs.wire import diagnose_address
from tutti.errors import InputError
from tutti.web.figures import Matrix
from tutti.web.steps import Steps
from tutti.web.watched import Document, Query, finding_document, missing, span_of, whole_number

_MOST_SECONDS = 7200  # that are kept
_MOST_BYTES = 8 << 20
_TIMEOUT_S = 2.0
_LINE = re.compile(r"^(tutti_[a-z0-9_]+)(?:\{(.*)\})? (\S+)$")
_POOL = re.compile(r'pool="((?:[^"\\]|\\.)*)"')
Sample = dict[tuple[str, str], float]
# a line of a run's figures, by what Prometheus calls it
_STEP = {
    "loss": "tutti_loss", "seconds": "tutti_step_duration_seconds", "mfu": "tutti_mfu_ratio",
    "tokens_per_s": "tutti_throughput_tokens_per_second",
    "predicted_s": "tutti_step_predicted_seconds",
    "validation_loss": "tutti_validation_loss",
}  # fmt: skip
_NEEDS_FOLDER = "needs the run's folder; the port of a run tells of steps and pools only"


def parse_metrics(text: str) -> Sample:
    """Return the gauges of ours by name and pool."""
    sample: Sample = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        pool = _POOL.search(match[2] or "")
        try:
            sample[match[1], pool[1] if pool else ""] = float(match[3])
        except ValueError:
            continue
    return sample


class ScrapedRun:
    """A run that is fetched once a second."""

    def __init__(self, host: str, port: int) -> None:
        self.name, self._host, self._port = f"{host}:{port}", host, port
        shown = f"[{host}]" if ":" in host else host
        self._url = f"http://{shown}:{port}/metrics"
        self._lock = threading.Lock()
        self._steps = Steps()
        self._samples: deque[tuple[int, Sample]] = deque(maxlen=_MOST_SECONDS)
        self._said = ""
        self._fetched = 0.0
        if not self._fetch():
            raise InputError(
                f"{self.name}: {self._said}; give a run's folder, or the address of its "
                "measure.prometheus_port"
            )

    def _fetch(self) -> bool:
        """Fetch what the run says now, at most once a second; tell whether it answered."""
        now = time.time()
        if now - self._fetched < 0.9:
            return not self._said
        self._fetched = now
        try:
            with urllib.request.urlopen(self._url, timeout=_TIMEOUT_S) as answer:
                sample = parse_metrics(answer.read(_MOST_BYTES).decode("utf-8", "replace"))
        except (OSError, ValueError, urllib.error.URLError) as error:
            self._said = f"does not answer ({getattr(error, 'reason', error)})"
            return False
        if not sample:
            self._said = "answers, but not with figures of a run"
            return False
        self._said = ""
        self._samples.append((int(now), sample))
        step = sample.get(("tutti_step", ""))
        if step is not None and step > (self._steps.last("step") or 0):
            line = {ours: sample.get((name, "")) for ours, name in _STEP.items()}
            known = {k: v for k, v in line.items() if v is not None}
            self._steps.add({"step": int(step), "at": now, **known})
        return True

    def summary(self) -> Document:
        """Return what stands in the list of runs."""
        with self._lock:
            answers = self._fetch()
            steps = self._steps
            return {
                "name": self.name, "state": "alive" if answers else "does not answer",
                "model": "", "cluster": "", "ranks": 0,
                "steps": steps.last("step"), "loss": steps.last("loss"),
                "seconds": steps.median("seconds"), "predicted_s": steps.last("predicted_s"),
                "tokens_per_s": steps.median("tokens_per_s"), "mfu": steps.median("mfu"),
                "effective": None, "overrun": steps.overrun, "generations": 0,
                "curves": steps.columns(("step", "loss", "tokens_per_s", "mfu"), 400),
            }  # fmt: skip

    def stamp(self, name: str) -> None:
        """Return that only the view itself says whether it has changed."""
        del name

    def view(self, name: str, query: Query) -> Document:
        """Return the document of a view."""
        with self._lock:
            self._fetch()
            if name == "run":
                return {
                    "state": self._said or "alive", "columns": self._steps.columns(),
                    "validation": self._steps.validation, "pools": [], "effective": None,
                    "overrun": self._steps.overrun, "repeated": self._steps.repeated,
                    "generations": [], "phases": [], "decisions": [], "notes": [],
                }  # fmt: skip
            if name == "heat":
                return self._heat(query)
            if name == "doctor":
                return self._doctor()
            return missing(_NEEDS_FOLDER)

    def _doctor(self) -> Document:
        try:
            return finding_document(diagnose_address(self._host, self._port, timeout_s=_TIMEOUT_S))
        except InputError as error:
            return missing(str(error))

    def _heat(self, query: Query) -> Document:
        names = sorted({name for _, sample in self._samples for name, pool in sample if pool})
        if not names:
            return missing("the run has told no figures of pools yet")
        figure = query.get("figure", "")
        figure = figure if figure in names else names[0]
        after, span = whole_number(query, "after", 0), span_of(query)
        begin = max(after + 1, self._samples[-1][0] - span)
        kept = [(second, sample) for second, sample in self._samples if second >= begin]
        pools = sorted({p for _, s in self._samples for n, p in s if n == figure})
        values = np.array(
            [[s.get((figure, pool), np.nan) for _, s in kept] for pool in pools], np.float32
        )
        matrix = Matrix(
            figure=figure, rows=tuple(pools), hosts=tuple(pools), labels=tuple(pools),
            seconds=np.array([second for second, _ in kept], np.int64),
            values=values.reshape(len(pools), len(kept)), every_s=1,
        )  # fmt: skip
        return matrix.to_document() | {
            "figures": names, "span": span, "notes": [], "more": bool(after),
        }  # fmt: skip
