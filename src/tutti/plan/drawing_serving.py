"""A Plan for serving as text: what it serves, its engines, which of them feeds which."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.table import Table
from rich.text import Text

from tutti.plan.plan import Pipeline, Plan
from tutti.plan.serving import Engine, Lengths, Limits, Role, Service
from tutti.units import many, seconds_text


def service_text(service: Service) -> str:
    """Return what is served in one line."""
    traffic = service.traffic
    rate = "all at once"
    if traffic.requests_per_s is not None:
        rate = f"{traffic.requests_per_s:g} requests/s ({traffic.arrivals})"
    shared = f", the first {traffic.shared_prefix:,} shared" if traffic.shared_prefix else ""
    return (
        f"{rate}, prompts {_lengths(traffic.prompt)}{shared}, answers {_lengths(traffic.output)}; "
        f"{limits_text(service.limits)}"
    )


def limits_text(limits: Limits) -> str:
    """Return the limits in a few words."""
    words = []
    if limits.first_token_s is not None:
        words.append(f"first token within {seconds_text(limits.first_token_s)}")
    if limits.per_token_s is not None:
        words.append(f"{seconds_text(limits.per_token_s)} per token")
    if not words:
        return "no limits"
    return f"{', '.join(words)}, for {100 * limits.share:g} % of requests"


def _lengths(lengths: Lengths) -> str:
    return f"of {lengths.mean:,.0f} tokens (up to {lengths.longest:,})"


def engine_text(pipeline: Pipeline, engine: Engine) -> str:
    """Return an engine's sizes behind its name."""
    role = "prefill and decode" if engine.role is Role.BOTH else engine.role.value
    words = [f"{many(pipeline.copies, 'equal engine')}, {role}", f"{pipeline.slots:,} slots each"]
    if pipeline.micro_batches > 1:
        words.append(f"{pipeline.micro_batches} steps under way")
    words.append(f"{engine.pages:,} pages of {engine.page_size}")
    if engine.host_pages:
        words.append(f"{engine.host_pages:,} more on the host")
    words.append(f"steps of up to {engine.chunk:,} tokens")
    if engine.role is not Role.DECODE:
        words.append(f"{100 * engine.share:.1f} % of requests")
    if engine.weights is not None:
        words.append(f"weights in {engine.weights}")
    if engine.cache is not None:
        words.append(f"keys and values in {engine.cache}")
    return ", ".join(words)


def draw_routes(plan: Plan) -> Iterator[Text | Table]:
    """Yield which prefill engines feed which decode engines."""
    if not plan.routes:
        return
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("prefill", "decode", "share"):
        table.add_column(name, justify="right" if name == "share" else "left")
    for route in plan.routes:
        table.add_row(
            f"pipeline {route.prefill}", f"pipeline {route.decode}", f"{100 * route.share:.1f} %"
        )
    yield Text("routes of keys and values", style="bold")
    yield table
