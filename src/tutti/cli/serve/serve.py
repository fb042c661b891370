"""`tutti serve`: an OpenAI client talks to a model on this machine."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.shared.adapters import adapter_folders
from tutti.cli.shared.quantities import bytes_of
from tutti.cli.shared.torch_needed import require_torch

if TYPE_CHECKING:
    from tutti.batching.router import Routing
    from tutti.plan.plan import Plan
    from tutti.server.hosts.front import Hosts
    from tutti.server.messages import ServerConfig

ROUTINGS = ("queues", "shares")


def serve(
    folder: Annotated[Path, typer.Argument(help="A Hugging Face or a tutti folder.")],
    plan: Annotated[
        Path | None, typer.Option(help="A plan of `tutti plan --serve`: its engines are started.")
    ] = None,
    routing: Annotated[
        str, typer.Option(help="Of a plan's requests: by queues, or strictly by shares.")
    ] = "queues",
    host: Annotated[str, typer.Option(help="Where to listen; others: 0.0.0.0.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free.", min=0, max=65535)] = 8000,
    name: Annotated[str | None, typer.Option(help="The model's; the folder's.")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="That clients must have; several. TUTTI_API_KEY too.")
    ] = None,
    apis: Annotated[int, typer.Option(help="API processes.", min=1)] = 1,
    queue: Annotated[int, typer.Option(help="Requests at a time; more get 429.", min=1)] = 1024,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …; the best here.")] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; the weights'.")] = None,
    weights: Annotated[str | None, typer.Option(help="Round to fp8, int8 or int4.")] = None,
    activations: Annotated[str | None, typer.Option(help="fp8, beside weights in fp8.")] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(help="NAME=FOLDER of a LoRA adapter; several.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="A folder, or 'bytes'.")] = None,
    slots: Annotated[int | None, typer.Option(help="Sequences at a time: 64.", min=1)] = None,
    max_length: Annotated[int | None, typer.Option(help="Of a context; the model's.")] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(help="On the host, for pages of sequences that give way: '16 GiB'; none."),
    ] = None,
    guesses: Annotated[int, typer.Option(help="Tokens tried ahead.", min=0)] = 0,
    step_ms: Annotated[
        float | None,
        typer.Option(help="Prompts are cut for steps beside answers to keep this.", min=0.1),
    ] = None,
    log_prompts: Annotated[bool, typer.Option(help="Write requests to the log.")] = False,
    trace_requests: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write a Chrome trace of each request to this folder."),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="The plan's engines are on hosts that join here."),
    ] = None,
    join: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Run this host's engines for the server there."),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(metavar="POOL/N", help="With --join: which node of the plan this host is."),
    ] = None,
    ports: Annotated[
        int,
        typer.Option(help="With --join: the first of five ports per chip.", min=1024, max=65000),
    ] = 29600,
    health_port: Annotated[
        int | None, typer.Option(help="With --join: where /health and /ready answer.", min=0)
    ] = None,
    wait: Annotated[
        float, typer.Option(help="With --join: seconds to wait for the server.", min=0.0)
    ] = 600.0,
) -> None:
    """Serve a model by OpenAI's interface until Ctrl-C."""
    require_torch("serve")
    from tutti.optional_imports import library

    for package in ("fastapi", "uvicorn", "zmq", "msgspec", "prometheus_client"):
        library(package, "tutti serve")
    _check_folder(folder)
    if join is not None:
        from tutti.cli.serve.hosts import join_server

        join_server(
            join, folder, plan, node, listen, ports=ports, health_port=health_port,
            device=device, wait_s=wait,
        )  # fmt: skip
        return
    from tutti.server.messages import ServerConfig

    engine: dict[str, Any] = {
        "device": device, "dtype": dtype, "weights": weights, "activations": activations,
        "tokenizer": tokenizer, "slots": slots, "max_length": max_length,
        "guesses": guesses or None,
        "host_bytes": None if host_memory is None else bytes_of("--host-memory", host_memory),
        "adapters": adapter_folders(adapter or []),
        "target_s": None if step_ms is None else step_ms / 1e3,
    }  # fmt: skip
    config = ServerConfig(
        folder=str(folder),
        name=name or folder.resolve().name,
        engine={key: value for key, value in engine.items() if value not in (None, {})},
        host=host,
        port=port,
        apis=apis,
        keys=_keys(api_key or []),
        queue=queue,
        log_prompts=log_prompts,
        traces=_trace_folder(trace_requests),
        routing=_routing(routing),
        spread=listen is not None,
    )
    deployment = None if plan is None else _deployment(plan, folder, config)
    hosts = None
    if listen is not None:
        from tutti.cli.serve.hosts import hosts_at

        hosts = hosts_at(listen, folder, deployment, config)
    _serve(config, deployment, hosts)


def _serve(config: ServerConfig, plan: Plan | None, hosts: Hosts | None) -> None:
    from tutti.server.supervisor import Supervisor

    host = config.host
    with Supervisor(config, tell=partial(typer.echo, err=True), plan=plan, hosts=hosts) as server:
        signal.signal(signal.SIGTERM, server.stop)
        signal.signal(signal.SIGINT, server.stop)
        shown = f"[{host}]" if ":" in host else host
        typer.echo(f"serving '{config.name}' at http://{shown}:{server.port}/v1", err=True)
        if not config.keys and host not in ("127.0.0.1", "localhost", "::1"):
            typer.echo("anybody who reaches this address may use it: no --api-key", err=True)
        server.run()


def _deployment(path: Path, folder: Path, config: ServerConfig) -> Plan:
    """Return a plan that can be run: here, or on hosts that join."""
    from tutti.server.planned_engines import check_options, open_deployment

    check_options(config.engine)
    return open_deployment(path, folder, chips=() if config.spread else None)


def _routing(asked: str) -> Routing:
    from tutti.errors import InputError, hint

    if asked not in ROUTINGS:
        raise InputError(f"serve: --routing is '{asked}'; {hint(asked, ROUTINGS)}")
    return asked  # type: ignore[return-value]  # one of them


def _trace_folder(path: Path | None) -> str:
    """Make the folder of traces."""
    from tutti.errors import InputError

    if path is None:
        return ""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--trace-requests: {path}: {error.strerror}") from None
    return str(path.resolve())


def _check_folder(folder: Path) -> None:
    """Refuse a folder that is none before processes are started."""
    from tutti.errors import InputError

    if not folder.is_dir():
        raise InputError(f"serve: {folder} is not a folder; give a model's")


def _keys(given: list[str]) -> tuple[str, ...]:
    return tuple(key for key in (*given, os.environ.get("TUTTI_API_KEY", "")) if key)
