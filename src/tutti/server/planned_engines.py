"""The engines of a plan on this machine: what is checked before any is started, and how each is.

Needs no torch: whoever starts processes need not be one that computes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tutti.errors import InputError
from tutti.hardware.topology import Position
from tutti.launch.secret import SECRET, new_secret
from tutti.models.load import load_model
from tutti.plan.check import embedded_cluster, require_valid
from tutti.plan.engine_part import engine_part, num_engines, pipeline_of
from tutti.plan.files import load_plan, refer_to_model
from tutti.plan.plan import Plan
from tutti.ranks.local_capacity import DEVICE, require_chips_here
from tutti.ranks.local_processes import free_port
from tutti.server.engine_group import EngineGroup
from tutti.server.hosts.rank_hosts import seats_of
from tutti.server.messages import ServerConfig, ServerFolder

if TYPE_CHECKING:
    from tutti.server.hosts.front import Hosts

# what a plan says itself, of each engine
PLANNED = ("slots", "max_length", "weights", "target_s")
UNPLANNED = ("adapters", "guesses", "activations")


def open_deployment(path: Path, folder: Path, chips: Iterable[Position] | None = None) -> Plan:
    """Return a plan that can be run here with a model folder; else say why not.

    `chips`: those that are to be here; all of the plan's.
    """
    plan = load_plan(path)
    if plan.job.serving is None:
        raise InputError(f"{path}: is for training; tutti plan --serve makes one for serving")
    model, cluster = load_model(str(folder)), embedded_cluster(plan)
    if plan.model.hash and plan.model.hash != refer_to_model(model).hash:
        raise InputError(
            f"{path}: is for model '{plan.model.name}', but '{folder}' has another shape; plan "
            "again, or serve the planned model"
        )
    require_valid(plan, model, cluster)
    require_chips_here(plan, cluster, os.environ, chips=chips)
    return plan


def check_options(options: Mapping[str, object]) -> None:
    """Refuse options of an engine that a plan says itself, or that its engines do not have."""
    for name in PLANNED:
        if name in options:
            raise InputError(f"serve: '{name}' is the plan's; leave it out, or plan again")
    for name in UNPLANNED:
        if name in options:
            raise InputError(f"serve: '{name}' is for one engine; leave it out, or --plan")


def engine_groups(plan: Plan, folder: ServerFolder, config: ServerConfig) -> list[EngineGroup]:
    """Return the engines of a plan, each with a process per rank."""
    threads = str(max(1, (os.cpu_count() or 1) // plan.num_ranks))
    return [_group(plan, number, folder, config, threads) for number in range(num_engines(plan))]


def hosted_groups(plan: Plan, folder: ServerFolder, hosts: Hosts) -> list[EngineGroup]:
    """Return the engines of a plan on hosts that join."""
    from tutti.server.hosts.hosted_group import HostedGroup

    seats, groups = seats_of(plan), list[EngineGroup]()
    for number in range(num_engines(plan)):
        own = [seat for (engine, _), seat in seats.items() if engine == number]
        groups.append(HostedGroup(number, folder, hosts, own, engine_name(plan, number)))
    return groups


def engine_name(plan: Plan, number: int) -> str:
    """Return what users are told of an engine as."""
    pipeline, copy = pipeline_of(plan, number)
    several = plan.pipelines[pipeline].copies > 1
    return f"engine {number} (pipeline {pipeline}{f', copy {copy}' if several else ''})"


def _group(
    plan: Plan, number: int, folder: ServerFolder, config: ServerConfig, threads: str
) -> EngineGroup:
    ranks = engine_part(plan, number).num_ranks
    device = config.engine.get("device")

    def environment(rank: int) -> dict[str, str]:
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        if "OMP_NUM_THREADS" not in os.environ:
            own["OMP_NUM_THREADS"] = threads
        return own | ({DEVICE: str(device)} if device else {})

    def fresh() -> dict[str, str]:
        return {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            SECRET: new_secret(),
        }

    return EngineGroup(
        number,
        folder,
        ranks=ranks,
        module="rank_process",
        environment=environment,
        fresh=fresh,
        name=engine_name(plan, number),
    )
