"""Meeting: how a process that a launcher started finds the store of its job.

The process with RANK 0 keeps the store, at MASTER_PORT. Where torchrun has a store of its own at
that port, which asks nobody who he is, ours is at another one, and torchrun's holds nothing but
that port, sealed with the job's secret: what a stranger writes there is not believed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from tutti.comm.entry.listener import Strangers
from tutti.comm.entry.store import KEEPER, StoreClient, StoreError, StoreServer
from tutti.comm.entry.trust import Key, StrangerError
from tutti.launch.secret import Secret, all_here, generation

_LOOPBACK = "127.0.0.1"
_PORT = "tutti/store"
_LOOK_S = 0.2
_kept: list[StoreServer] = []  # for as long as the process lives


def open_store(
    secret: Secret,
    timeout_s: float,
    *,
    environ: Mapping[str, str] = os.environ,
    board: Any = None,
    stranger: Callable[[str], None] | None = None,
) -> StoreClient:
    """Return the job's store.

    `board` is a store of torch's that all ranks reach, to be told the port; by default the one that
    torchrun keeps, if any.
    """
    key = Key(secret, "store", generation(environ))
    rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    here = all_here(environ)
    address = _LOOPBACK if here else environ["MASTER_ADDR"]
    port = int(environ["MASTER_PORT"])
    if board is None and environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True":
        board = _agents_store(environ["MASTER_ADDR"], port, timeout_s)
    if rank == KEEPER:
        at = _LOOPBACK if here else _everywhere(address)
        port = _keep(key, world, (at, 0 if board is not None else port), stranger)
        if board is not None:
            board.set(_board_key(environ), key.seal(str(port)))
        address = "::1" if at == "::" else _LOOPBACK
    elif board is not None:
        port = _read_port(board, key, environ, timeout_s, stranger)
    return StoreClient(key, rank, address, port, timeout_s=timeout_s)


def _everywhere(master: str) -> str:
    """Return what to listen at where others may reach this host by names and ways of their own."""
    with contextlib.suppress(OSError):
        families = {entry[0] for entry in socket.getaddrinfo(master, None)}
        if socket.AF_INET not in families:
            return "::"
    return "0.0.0.0"


def _keep(key: Key, world: int, at: tuple[str, int], stranger: Callable[[str], None] | None) -> int:
    address, port = at
    try:
        server = StoreServer(key, world, address, port, stranger=stranger)
    except OSError as error:
        raise StoreError(
            f"no rendezvous at {address}:{port} ({error.strerror}); is the port in use?"
        ) from None
    _kept.append(server)
    return server.port


def _board_key(environ: Mapping[str, str]) -> str:
    return f"{_PORT}/{generation(environ)}"


def _agents_store(address: str, port: int, timeout_s: float) -> Any:
    from torch._C._distributed_c10d import TCPStore

    try:
        return TCPStore(
            address, port, None, is_master=False, timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )  # fmt: skip
    except RuntimeError as error:
        raise StoreError(
            f"torchrun's store at {address}:{port} does not answer ({_first_line(error)})"
        ) from None


def _read_port(
    board: Any,
    key: Key,
    environ: Mapping[str, str],
    timeout_s: float,
    stranger: Callable[[str], None] | None,
) -> int:
    """Return the port that rank 0 has written; what others write there is named and passed over."""
    name, until = _board_key(environ), time.monotonic() + timeout_s
    strangers = Strangers("torchrun's store", stranger)
    while True:
        try:
            board.wait([name], timedelta(seconds=max(until - time.monotonic(), _LOOK_S)))
            posted = bytes(board.get(name))
        except RuntimeError as error:
            raise StoreError(
                f"after {timeout_s:g} s rank {KEEPER} has not said where the ranks meet "
                f"({_first_line(error)})"
            ) from None
        try:
            return int(key.unseal(posted.decode("utf-8", "replace")))
        except StrangerError as error:
            strangers.note("", "an unknown address", f"'{name}' {error}", posted)
        if time.monotonic() > until:
            raise StoreError(
                f"after {timeout_s:g} s torchrun's store holds no port of rank {KEEPER}, but what "
                "somebody else wrote; have all ranks the same secret?"
            )
        time.sleep(_LOOK_S)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
