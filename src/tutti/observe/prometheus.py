"""Figures that a Prometheus server fetches over HTTP, named by its rules.

Of steps and pools, of every rank and of every host with their pool and node; Prometheus adds its
own `job` and `instance`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tutti.errors import InputError
from tutti.observe import evidence
from tutti.observe.figures import FIGURES
from tutti.observe.prometheus_hosts import HostFigures
from tutti.observe.rank_series import RANK_FIELDS
from tutti.observe.record import RankTimes, StepRecord
from tutti.observe.step_figures import POOL_FIGURES, STEP_FIGURES, StepFigure

MOST_RANKS = 2048  # of which each has gauges of its own


class Prometheus:
    """Serves the newest figures."""

    def __init__(
        self,
        port: int,
        address: str = "127.0.0.1",
        *,
        places: Sequence[tuple[str, int]] = (),
        folder: Path | None = None,
    ) -> None:
        """Listen; `places` are pool and node of every rank, `folder` is the run's."""
        try:
            import prometheus_client
        except ImportError:
            raise InputError(
                "measure.prometheus_port: the package 'prometheus-client' is not installed; "
                "pip install 'tutti-ml[observe]'"
            ) from None
        self._registry = prometheus_client.CollectorRegistry()
        self._client: Any = prometheus_client
        self._metrics: dict[str, Any] = {}
        self._places = places[:MOST_RANKS]
        if folder is not None:
            self._registry.register(HostFigures(folder))
        try:
            self._server = ThreadingHTTPServer(
                (address, port), _handler(prometheus_client, self._registry, folder)
            )
        except OSError as error:
            raise InputError(
                f"measure.prometheus_port: {port} cannot be listened on ({error.strerror})"
            ) from None
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="figures", daemon=True
        )
        self._thread.start()

    def _metric(self, figure: StepFigure, labels: tuple[str, ...]) -> Any:
        if figure.name not in self._metrics:
            counts = figure.kind == "counter"
            make = self._client.Counter if counts else self._client.Gauge
            self._metrics[figure.name] = make(
                figure.name, figure.means, labels, registry=self._registry
            )
        return self._metrics[figure.name]

    def _tell(self, figure: StepFigure, value: float, pool: str = "") -> None:
        metric = self._metric(figure, ("pool",) if pool else ())
        metric = metric.labels(pool) if pool else metric
        if figure.kind == "counter":
            metric.inc(max(0.0, value))
        else:
            metric.set(value)

    def write(self, record: StepRecord) -> None:
        """Tell every figure of a step and of its pools."""
        for figure in STEP_FIGURES:
            value = getattr(record, figure.field, None)
            if value is not None:
                self._tell(figure, float(value))
        for pool, times in (record.pools or {}).items():
            for figure in POOL_FIGURES:
                self._tell(figure, float(getattr(times, figure.field)), pool)

    def ranks(self, times: Sequence[RankTimes]) -> None:
        """Tell where the step of every rank went."""
        for name, field in RANK_FIELDS.items():
            known = FIGURES[f"tutti_{name}"]
            figure = StepFigure(field, known.name, known.means, "rank")
            metric = self._metric(figure, ("pool", "node", "rank"))
            for rank, ((pool, node), own) in enumerate(zip(self._places, times, strict=False)):
                metric.labels(pool, str(node), str(rank)).set(getattr(own, field))

    def validation(self, step: int, loss: float) -> None:
        """Tell the loss."""
        del step
        figure = next(f for f in STEP_FIGURES if f.field == "validation_loss")
        self._tell(figure, loss)

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(client: Any, registry: Any, folder: Path | None) -> Any:
    """Return what answers: the figures, and beside them the evidence in the run's folder."""
    figures: Any = client.MetricsHandler.factory(registry)

    class Handler(figures):  # type: ignore[misc]
        def do_GET(self) -> None:  # noqa: N802 (its base calls it so)
            """Answer a request."""
            if self.path.partition("?")[0] != evidence.PATH or folder is None:
                super().do_GET()
                return
            data = evidence.packed_evidence(folder)
            self.send_response(200)
            self.send_header("Content-Type", "application/zip")
            self.send_header("Content-Length", str(len(data)))
            self.send_header(evidence.NOW, str(time.time_ns()))
            self.end_headers()
            self.wfile.write(data)

    return Handler
