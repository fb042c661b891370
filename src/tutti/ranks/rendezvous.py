"""How the ranks of a job find each other, and make sure that they are of one mind.

A process is started by torchrun, by `tutti launch`'s files or by `tutti train` itself; all of them
set torchrun's variables, and hand over the job's secret, which the ranks prove to each other.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
from collections.abc import Callable, Mapping
from datetime import timedelta

from tutti.comm.entry import find_store
from tutti.comm.entry.store import Store, StoreClient
from tutti.errors import InputError, TuttiError
from tutti.launch.secret import Secret, find_secret

READING_S = 10.0  # for other ranks to read in what they differ
COMING_S = 60.0  # for other ranks to come and read why there is nothing to do

log = logging.getLogger("tutti")
_hearers: list[Callable[[str], None]] = []


def tell_of_strangers(hearer: Callable[[str], None]) -> None:
    """Let somebody else than the log hear of strangers that were turned away from this process."""
    _hearers.append(hearer)


def name_stranger(text: str) -> None:
    """Say who was turned away; called by any thread."""
    log.warning(text)
    for hearer in _hearers:
        hearer(text)


@functools.cache
def job_secret() -> Secret:
    """Return the secret of this process's job."""
    return find_secret(os.environ)


@functools.cache
def open_store(timeout_s: float) -> StoreClient:
    """Return the job's store; the process with RANK 0 keeps it."""
    return find_store.open_store(job_secret(), timeout_s, stranger=name_stranger)


def wait_for(store: Store, key: str, timeout_s: float) -> str:
    """Return a value that another rank writes."""
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except RuntimeError:
        raise TuttiError(f"after {timeout_s:g} s rank 0 has not said its {key}") from None
    return store.get(key).decode()


def agree(store: Store, rank: int, world: int, own: Mapping[str, str], timeout_s: float) -> None:
    """Raise unless every rank has come with the same facts; name who differs, or who is missing."""
    store.set(f"facts/{rank}", json.dumps(own))
    difference = ""
    for other in range(world):
        try:
            store.wait([f"facts/{other}"], timedelta(seconds=timeout_s))
        except RuntimeError:
            missing = [r for r in range(world) if not store.check([f"facts/{r}"])]
            names = ", ".join(map(str, missing[:16])) + (", …" if len(missing) > 16 else "")
            raise TuttiError(
                f"after {timeout_s:g} s these ranks have not come: {names}; were all processes "
                "started, and can they reach the master?"
            ) from None
        difference = difference or _difference(store, rank, other, own)
    if difference:
        all_read(store, "facts", rank, world, min(timeout_s, READING_S))
        raise InputError(difference)


def all_read(store: Store, what: str, rank: int, world: int, timeout_s: float) -> None:
    """Say that a rank has read something before it leaves; the store's keeper waits for all."""
    store.set(f"{what} read/{rank}", "yes")
    if rank == 0:
        with contextlib.suppress(RuntimeError):
            keys = [f"{what} read/{r}" for r in range(world)]
            store.wait(keys, timedelta(seconds=timeout_s))


def _difference(store: Store, rank: int, other: int, own: Mapping[str, str]) -> str:
    """Say in what another rank differs; empty if it does not."""
    theirs = json.loads(store.get(f"facts/{other}"))
    for name, value in own.items():
        if theirs.get(name) != value:
            return (
                f"rank {other} has {name} {theirs.get(name)!r}, rank {rank} has {value!r}; "
                "start all ranks with the same files and versions"
            )
    return ""
