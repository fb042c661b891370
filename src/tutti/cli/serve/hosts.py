"""`tutti serve --listen` and `--join`: a planned deployment on several hosts."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tutti.errors import InputError, hint

if TYPE_CHECKING:
    from tutti.plan.plan import Plan
    from tutti.server.hosts.agent import Agent
    from tutti.server.hosts.front import Hosts
    from tutti.server.messages import ServerConfig


def hosts_at(listen: str, folder: Path, plan: Plan | None, config: ServerConfig) -> Hosts:
    """Return the hosts of a plan, which join at an address."""
    from tutti.elastic.join import address_of
    from tutti.server.hosts.facts import facts_of
    from tutti.server.hosts.front import Hosts
    from tutti.server.hosts.rank_hosts import hosts_of, seats_of
    from tutti.server.sockets import shared_secret

    if plan is None:
        raise InputError("serve: --listen is for the engines of a plan; give --plan")
    names = hosts_of(seats_of(plan))
    given = {key: value for key, value in config.engine.items() if key != "device"}
    hosts = Hosts(
        address_of(listen, "--listen"), shared_secret(), facts_of(plan, folder), names, given
    )
    typer.echo(f"waiting at {listen} for {', '.join(names)}", err=True)
    return hosts


def join_server(
    front: str,
    folder: Path,
    plan: Path | None,
    node: str | None,
    listen: str | None,
    *,
    ports: int,
    health_port: int | None,
    device: str | None,
    wait_s: float,
) -> None:
    """Run a host's engines until the server there ends, or SIGTERM."""
    from tutti.elastic.join import address_of
    from tutti.launch.identity import NODE
    from tutti.plan.check import embedded_cluster
    from tutti.ranks.local_capacity import require_chips_here
    from tutti.server.hosts.agent import Agent, AgentSettings
    from tutti.server.hosts.rank_hosts import hosts_of, seats_of
    from tutti.server.planned_engines import open_deployment
    from tutti.server.sockets import shared_secret

    host = node or os.environ.get(NODE, "")
    if listen is not None:
        raise InputError("serve: --listen and --join are two servers; start each by itself")
    if plan is None or not host:
        raise InputError("serve: --join needs --plan and --node: which engines are this host's")
    deployed = open_deployment(plan, folder, chips=())
    seats = seats_of(deployed)
    if host not in hosts_of(seats):
        raise InputError(f"{plan.name}: has no engines on '{host}'; {hint(host, hosts_of(seats))}")
    if not device:
        here = [seat.chip for seat in seats.values() if seat.host == host]
        require_chips_here(deployed, embedded_cluster(deployed), os.environ, chips=here)
    settings = AgentSettings(
        front=address_of(front, "--join"), host=host, folder=folder, plan=deployed, ports=ports,
        device=device, wait_s=wait_s,
    )  # fmt: skip
    _run(Agent(settings, shared_secret(), partial(typer.echo, err=True)), health_port)


def _run(agent: Agent, health_port: int | None) -> None:
    signal.signal(signal.SIGTERM, agent.stop)
    signal.signal(signal.SIGINT, agent.stop)
    if health_port is None:
        agent.run()
        return
    from tutti.server.hosts.health import Health

    health = Health(agent, health_port)
    try:
        agent.run()
    finally:
        health.close()
