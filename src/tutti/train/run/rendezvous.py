"""How the ranks of a job find each other, and make sure that they are of one mind.

A process is started by torchrun, by `tutti launch`'s files or by `tutti train` itself; all of them
set torchrun's variables. A store lives at the master's address; every restart of the job has names
of its own in it, for a new generation must not read the addresses of a dead one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from tutti.document import plain
from tutti.errors import InputError, TuttiError
from tutti.plan.files import plan_to_document, refer_to_cluster, refer_to_model
from tutti.train.run.planning import Job
from tutti.version import code_version


@functools.cache
def open_store(timeout_s: float) -> Store:
    """Return the job's store; the process with RANK 0 keeps it unless torchrun does already."""
    address, rank = os.environ["MASTER_ADDR"], int(os.environ["RANK"])
    port = int(os.environ["MASTER_PORT"])
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
    try:
        store = TCPStore(
            address, port, None, is_master=rank == 0 and not agent,
            timeout=timedelta(seconds=timeout_s), wait_for_workers=False,
        )  # fmt: skip
    except (dist.DistError, RuntimeError) as error:
        first = str(error).splitlines()[0]
        raise TuttiError(
            f"no store at {address}:{port} ({first}); is the port in use, or rank 0 missing?"
        ) from None
    generation = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"tutti/{generation}", store)


def wait_for(store: Store, key: str, timeout_s: float) -> str:
    """Return a value that another rank writes."""
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except (dist.DistError, RuntimeError):
        raise TuttiError(f"after {timeout_s:g} s rank 0 has not said its {key}") from None
    return store.get(key).decode()


def facts(job: Job) -> dict[str, str]:
    """Return what all ranks must agree on."""
    config = job.config
    return {
        "tutti version": code_version(),
        "torch version": torch.__version__.partition("+")[0],
        "plan": _digest(plan_to_document(job.plan)),
        "model": refer_to_model(job.spec).hash,
        "cluster": refer_to_cluster(job.cluster).hash,
        "seed": str(config.seed),
        "steps": str(config.steps),
        "optimizer": str(config.optimizer),
        "start": config.start,
        "checkpoint settings": json.dumps(plain(config.checkpoints)),
        "validation settings": json.dumps(plain(config.validation)),
    }


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def agree(store: Store, rank: int, world: int, own: Mapping[str, str], timeout_s: float) -> None:
    """Raise unless every rank has come with the same facts; name who differs, or who is missing."""
    store.set(f"facts/{rank}", json.dumps(own))
    for other in range(world):
        try:
            store.wait([f"facts/{other}"], timedelta(seconds=timeout_s))
        except (dist.DistError, RuntimeError):
            missing = [r for r in range(world) if not store.check([f"facts/{r}"])]
            names = ", ".join(map(str, missing[:16])) + (", …" if len(missing) > 16 else "")
            raise TuttiError(
                f"after {timeout_s:g} s these ranks have not come: {names}; were all processes "
                "started, and can they reach the master?"
            ) from None
        theirs = json.loads(store.get(f"facts/{other}"))
        for name, value in own.items():
            if theirs.get(name) != value:
                raise InputError(
                    f"rank {other} has {name} {theirs.get(name)!r}, rank {rank} has {value!r}; "
                    "start all ranks with the same files and versions"
                )
