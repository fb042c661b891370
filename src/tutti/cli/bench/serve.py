"""`tutti bench serve`: requests through the engine, with transformers' beside us."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.cli.shared.torch_needed import require_torch


class Lengths(StrEnum):
    """Which requests."""

    SHORT = "short"
    CHAT = "chat"


class Arrivals(StrEnum):
    """How requests arrive."""

    AT_ONCE = "at-once"
    POISSON = "poisson"
    BURSTS = "bursts"


def serve(
    folder_or_url: Annotated[
        str | None,
        typer.Argument(help="A model folder, or a server's address."),
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="All requests at once, in this process.")
    ] = False,
    scheduling: Annotated[
        bool, typer.Option("--scheduling", help="The scheduler alone, without a model.")
    ] = False,
    requests: Annotated[int, typer.Option(help="How many.", min=1)] = 32,
    lengths: Annotated[
        Lengths,
        typer.Option(help="short: 16-256 in, 16-128 out, evenly; chat: as people write."),
    ] = Lengths.SHORT,
    threads: Annotated[int | None, typer.Option(help="Of the host, for both.", min=1)] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …; the best here.")] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="fp32, bf16, fp16; of each side the fastest counts.")
    ] = None,
    slots: Annotated[int, typer.Option(help="Ours, at a time.", min=1)] = 64,
    peers: Annotated[
        bool, typer.Option("--peers/--no-peers", help="Also transformers' continuous batching.")
    ] = True,
    arrival: Annotated[
        Arrivals, typer.Option(help="How requests reach a server.")
    ] = Arrivals.POISSON,
    rate: Annotated[float | None, typer.Option(help="A second; left out: all at once.")] = None,
    api_key: Annotated[str, typer.Option(help="A server's.", envvar="TUTTI_API_KEY")] = "",
    json: Json = False,
) -> None:
    """Time a trace of requests: through the engine beside transformers', or at a server."""
    from tutti.errors import InputError

    if scheduling:
        _scheduling(slots if slots != 64 else 256, json=json)
        return
    if folder_or_url is not None and folder_or_url.startswith(("http://", "https://")):
        _load(folder_or_url, lengths, requests, arrival.value, rate, api_key, json=json)
        return
    if not offline or folder_or_url is None:
        lacking = (
            " --offline needs a model folder"
            if offline
            else ": give a server's address, --offline, or --scheduling"
        )
        raise InputError(f"bench serve{lacking}")
    _offline(
        Path(folder_or_url),
        lengths,
        requests,
        threads,
        device,
        dtype,
        slots,
        peers=peers,
        json=json,
    )


def _offline(
    folder: Path,
    lengths: Lengths,
    requests: int,
    threads: int | None,
    device: str | None,
    dtype: list[str] | None,
    slots: int,
    *,
    peers: bool,
    json: bool,
) -> None:
    require_torch("bench serve")
    import torch

    from tutti.bench import serving
    from tutti.bench.traces import trace
    from tutti.huggingface.dtypes import weight_dtype
    from tutti.models.load import load_model

    if threads is not None:
        torch.set_num_threads(threads)
    asked = trace(lengths.value, requests, load_model(str(folder)).vocab)
    longest = max(len(one.prompt) + one.new for one in asked)
    rows: list[serving.Served] = []
    sizes = {"slots": slots, "max_length": longest}
    for name in dtype or ["fp32"]:
        rows.append(serving.run_tutti(folder, asked, device=device, dtype=name, **sizes))
        if peers:
            torch_name = weight_dtype(name).name
            rows.append(serving.run_transformers(folder, asked, device=device, dtype=torch_name))
    plain_rows = [_plain(row) for row in rows]
    if json:
        print_json({"folder": str(folder), "requests": requests, "rows": plain_rows})
        return
    _print(plain_rows, f"{requests} requests at once, {torch.get_num_threads()} thread(s)")


def _load(
    url: str,
    lengths: Lengths,
    requests: int,
    arrival: str,
    rate: float | None,
    key: str,
    *,
    json: bool,
) -> None:
    """Send requests to a server, and print what they waited for."""
    import asyncio

    from tutti.bench.serving_load import arrivals, load, served_model
    from tutti.bench.traces import Asked, trace
    from tutti.cli.shared.progress import ProgressLine
    from tutti.errors import InputError

    url = url.rstrip("/").removesuffix("/v1")
    model, context = asyncio.run(served_model(url, key))
    asked = trace(lengths.value, requests, 256)  # tokens that every vocabulary has
    if context is not None:
        asked = [
            Asked(prompt=a.prompt[: context // 2], new=min(a.new, context // 2)) for a in asked
        ]
    times = arrivals(arrival, requests, rate)  # type: ignore[arg-type]
    with ProgressLine("answered", wanted=not json) as line:
        made = load(
            url, model, asked, times, key=key, progress=lambda n: line.say(f"{n} of {requests}")
        )
        loaded = asyncio.run(made)
    if json:
        print_json({"url": url, "model": model, "rate": rate, **loaded.plain()})
        return
    if loaded.failed:
        print_rich(f"{loaded.failed} of {loaded.requests} failed; the first: {loaded.first_error}")
    if loaded.failed == loaded.requests:
        raise InputError("bench serve: no request was answered")
    print_rich(
        f"{loaded.requests} requests of '{model}' in {loaded.seconds:.1f} s: "
        f"{loaded.output_rate:,.1f} new tokens/s, {loaded.request_rate:.2f} requests/s"
    )
    for name, shares in (
        ("first token", loaded.first_s), ("per token after it", loaded.per_token_s),
        ("between pieces", loaded.gap_s), ("whole", loaded.whole_s),
    ):  # fmt: skip
        text = ", ".join(f"{share} {1e3 * value:,.1f} ms" for share, value in shares.items())
        print_rich(f"  {name}: {text}")


def _scheduling(slots: int, *, json: bool) -> None:
    from dataclasses import asdict

    from tutti.bench.serving import time_scheduling

    scheduled = time_scheduling(slots)
    if json:
        print_json(asdict(scheduled))
        return
    print_rich(
        f"{scheduled.slots} slots, {scheduled.steps} steps in which all decode: "
        f"{scheduled.median_s * 1e3:.3f} ms of the host a step "
        f"(99 %: {scheduled.p99_s * 1e3:.3f} ms)"
    )


def _plain(row: Any) -> dict[str, Any]:
    first = row.percentile(50), row.percentile(99)
    return {
        "engine": row.engine,
        "dtype": row.dtype,
        "output tok/s": round(row.output_rate, 1),
        "seconds": round(row.seconds, 2),
        "cpu s": round(row.cpu_s, 2),
        "output tokens": row.output_tokens,
        "prompt tokens": row.prompt_tokens,
        "first token p50 s": None if first[0] is None else round(first[0], 3),
        "first token p99 s": None if first[1] is None else round(first[1], 3),
        "load s": round(row.load_s, 2),
        "note": row.note,
    }


def _print(rows: list[dict[str, Any]], title: str) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, title=title, caption="transformers: its continuous batching")
    hidden = ("note", "output tokens", "prompt tokens")
    rows = [{name: v for name, v in row.items() if name not in hidden} for row in rows]
    for name in rows[0]:
        table.add_column(name, justify="left" if name in ("engine", "dtype", "note") else "right")
    for row in rows:
        cells = ("–" if v is None else v if isinstance(v, str) else f"{v:,}" for v in row.values())
        table.add_row(*cells)
    print_rich(table)
