"""What a server counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tutti.server.messages import Load

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """Counters and histograms of one API process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"tutti_{name}", text, buckets=_SECONDS, registry=self._registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tutti_{name}", text, labels, registry=self._registry)

        self.first_token = histogram("first_token_seconds", "From a request to its first token")
        self.per_token = histogram("per_token_seconds", "Per token after the first, of a request")
        self.gap = histogram("gap_seconds", "Between two pieces of a stream")
        self.whole = histogram("request_seconds", "From a request to its end")
        self.requests = counter("requests", "Requests by how they ended", "route", "status")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts")
        self.cached_tokens = counter("cached_tokens", "Tokens of prompts that were in pages")
        self.output_tokens = counter("output_tokens", "Tokens that were generated")
        self.restarts = counter("engine_restarts", "Engines that died")
        self._gauges = {
            name: Gauge(f"tutti_engine_{name}", text, registry=self._registry)
            for name, text in {
                "running": "Sequences that have a slot",
                "waiting": "Sequences that wait for one",
                "pages_used": "Pages in use",
                "pages": "Pages in all",
                "steps": "Steps so far",
                "computed_tokens": "Tokens that steps computed",
                "preemptions": "Sequences that lost their pages",
                "stowed_pages": "Pages that moved to the host",
                "fetched_pages": "Pages that came back from the host",
                "guessed_tokens": "Tokens that were guessed",
                "foreseen_tokens": "Guesses that were right",
            }.items()
        }

    def text(self, load: Load | None) -> bytes:
        """Return all of it, as Prometheus reads it."""
        if load is not None:
            for name, gauge in self._gauges.items():
                gauge.set(getattr(load, name))
        return generate_latest(self._registry)
