"""Store: where ranks leave words for each other before they are connected.

One rank keeps it; the others, and itself, are clients. Both sides of every connection prove that
they know the job's secret (`trust`) before a word is said: a stranger can neither read nor write,
nor come in a rank's place. Words are JSON with their length before them.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

from tutti.comm.entry.listener import Door, Strangers
from tutti.comm.entry.trust import REPLY_BYTES, Called, Caller, Key, StrangerError
from tutti.comm.reactor import Reactor
from tutti.comm.transport.tcp import listen
from tutti.errors import TuttiError

KEEPER = 0  # the rank at whose process the store is
_LENGTH = struct.Struct("<I")
_MOST_BYTES = 1 << 30  # of a word; plans of thousands of chips are some MB
_GRACE_S = 30.0  # beyond a time-out, for the answer to arrive
_RETRY_S = 0.1
_DOUBT_S = 10.0  # how long somebody else may be at the port: the end of an earlier start


class StoreError(TuttiError, RuntimeError):
    """A word that did not come, or a store that is gone."""


class Store(Protocol):
    """What ranks need of a store; those of torch.distributed have it, too."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def get(self, key: str) -> bytes:
        """Read a value, waiting for it."""

    def check(self, keys: list[str]) -> bool:
        """Tell whether all keys are there."""

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait until all keys are there."""


# --- the keeper --------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Client:
    """A rank at the store."""

    sock: socket.socket
    unread: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)


@dataclass(slots=True, eq=False)
class _Wait:
    """A client that waits for words."""

    client: _Client
    keys: list[str]
    missing: set[str]


class StoreServer:
    """The words of a job, kept in a thread of its own."""

    def __init__(
        self,
        key: Key,
        world: int,
        address: str,
        port: int = 0,
        *,
        stranger: Callable[[str], None] | None = None,
    ) -> None:
        listener = listen(address, port)
        self.port: int = listener.getsockname()[1]
        self._words: dict[str, str] = {}
        self._waits: dict[str, list[_Wait]] = {}  # by the key that is missing
        self._clients: set[_Client] = set()
        self._reactor = Reactor("tutti-store")
        self._door = Door(
            self._reactor,
            listener,
            lambda: Called(key, KEEPER, world),
            self._admit,
            Strangers(f"the rendezvous at port {self.port}", stranger),
        )
        self._reactor.call(self._door.open)

    def close(self) -> None:
        """End it; whoever still waits finds it gone."""

        def end() -> None:
            self._door.close()
            for client in list(self._clients):
                self._drop(client)

        self._reactor.call(end)
        self._reactor.stop()

    def _admit(self, sock: socket.socket, peer: int) -> None:
        del peer
        client = _Client(sock)
        self._clients.add(client)
        self._watch(client)

    def _watch(self, client: _Client) -> None:
        write = (lambda: self._write(client)) if client.unsent else None
        self._reactor.watch(client.sock, lambda: self._read(client), write)

    def _drop(self, client: _Client) -> None:
        self._clients.discard(client)
        self._reactor.watch(client.sock, None, None)
        client.sock.close()

    def _read(self, client: _Client) -> None:
        try:
            received = client.sock.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._drop(client)
            return
        client.unread += received
        while client in self._clients and len(client.unread) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(client.unread)
            whole = _LENGTH.size + length
            if length > _MOST_BYTES:
                self._drop(client)
            if len(client.unread) < whole:
                return
            body = bytes(client.unread[_LENGTH.size : whole])
            del client.unread[:whole]
            self._asked(client, body)

    def _asked(self, client: _Client, body: bytes) -> None:
        try:
            asked = json.loads(body)
            if "set" in asked:
                self._set(str(asked["set"]), str(asked["value"]))
                self._answer(client, {})
            else:
                self._get(client, [str(key) for key in asked["get"]], float(asked["timeout_s"]))
        except (ValueError, KeyError, TypeError):  # a rank of ours that speaks another language
            self._drop(client)

    def _set(self, key: str, value: str) -> None:
        self._words[key] = value
        for wait in self._waits.pop(key, []):
            wait.missing.discard(key)
            if not wait.missing:
                self._answer(wait.client, {"values": [self._words[k] for k in wait.keys]})

    def _get(self, client: _Client, keys: list[str], timeout_s: float) -> None:
        wait = _Wait(client, keys, {key for key in keys if key not in self._words})
        if not wait.missing:
            self._answer(client, {"values": [self._words[key] for key in keys]})
        elif timeout_s <= 0:
            self._answer(client, {"missing": sorted(wait.missing)})
        else:
            for key in wait.missing:
                self._waits.setdefault(key, []).append(wait)
            self._reactor.after(timeout_s, lambda: self._give_up(wait))

    def _give_up(self, wait: _Wait) -> None:
        if not wait.missing:
            return
        for key in wait.missing:
            self._waits[key].remove(wait)
        self._answer(wait.client, {"missing": sorted(wait.missing)})
        wait.missing = set()

    def _answer(self, client: _Client, value: dict[str, Any]) -> None:
        if client in self._clients:
            client.unsent += _packed(value)
            self._write(client)

    def _write(self, client: _Client) -> None:
        try:
            while client.unsent:
                sent = client.sock.send(client.unsent)
                del client.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(client)
            return
        self._watch(client)


# --- the others --------------------------------------------------------------------------------


class StoreClient:
    """The store, as a rank sees it; any thread may ask."""

    def __init__(self, key: Key, rank: int, address: str, port: int, *, timeout_s: float) -> None:
        self._where = f"{address}:{port}"
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._socket = _connected(key, rank, address, port, timeout_s)

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._ask({"set": key, "value": value}, self._timeout_s)

    def get(self, key: str) -> bytes:
        """Read a value, waiting for it."""
        return self.get_all([key], self._timeout_s)[0].encode()

    def get_all(self, keys: list[str], timeout_s: float) -> list[str]:
        """Read values, waiting for all of them."""
        answer = self._get(keys, timeout_s)
        if "values" not in answer:
            names = ", ".join(answer["missing"][:8])
            raise StoreError(f"after {timeout_s:g} s nobody has said {names} at {self._where}")
        values: list[str] = answer["values"]
        return values

    def check(self, keys: list[str]) -> bool:
        """Tell whether all keys are there."""
        return "values" in self._get(keys, 0.0)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait until all keys are there."""
        self.get_all(keys, timeout.total_seconds())

    def close(self) -> None:
        """Leave."""
        self._socket.close()

    def _get(self, keys: list[str], timeout_s: float) -> dict[str, Any]:
        return self._ask({"get": keys, "timeout_s": timeout_s}, timeout_s)

    def _ask(self, value: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        try:
            with self._lock:
                self._socket.settimeout(timeout_s + _GRACE_S)
                self._socket.sendall(_packed(value))
                (length,) = _LENGTH.unpack(_receive(self._socket, _LENGTH.size))
                answer: dict[str, Any] = json.loads(_receive(self._socket, length))
                return answer
        except (OSError, ValueError) as error:
            raise StoreError(
                f"the rendezvous at {self._where} is gone ({error}); look at rank {KEEPER}'s log"
            ) from None


class PrefixedStore:
    """A part of a store, with names of its own."""

    def __init__(self, prefix: str, store: Store) -> None:
        self._prefix, self._store = prefix, store

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._store.set(f"{self._prefix}/{key}", value)

    def get(self, key: str) -> bytes:
        """Read a value, waiting for it."""
        return self._store.get(f"{self._prefix}/{key}")

    def check(self, keys: list[str]) -> bool:
        """Tell whether all keys are there."""
        return self._store.check([f"{self._prefix}/{key}" for key in keys])

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait until all keys are there."""
        self._store.wait([f"{self._prefix}/{key}" for key in keys], timeout)


def _connected(key: Key, rank: int, address: str, port: int, timeout_s: float) -> socket.socket:
    """Return a connection on which both sides have proven themselves; the keeper may come late."""
    began = time.monotonic()
    until = began + timeout_s
    while True:
        left = until - time.monotonic()
        try:
            sock = socket.create_connection((address, port), timeout=max(left, _RETRY_S))
        except OSError as error:
            reason = f"{error.strerror or error}"
        else:
            try:
                _prove(sock, Caller(key, rank, KEEPER))
                return sock
            except StrangerError as error:
                reason = f"the port {error}"
                until = min(until, began + _DOUBT_S)
            except OSError as error:
                reason = f"the handshake failed: {error.strerror or error}"
            sock.close()
        if time.monotonic() + _RETRY_S > until:
            waited = time.monotonic() - began
            raise StoreError(
                f"no rendezvous at {address}:{port} after {waited:.0f} s ({reason}); is rank "
                f"{KEEPER} there, and have all ranks the same secret?"
            )
        time.sleep(_RETRY_S)


def _prove(sock: socket.socket, caller: Caller) -> None:
    sock.sendall(caller.hello)
    sock.sendall(caller.answer(_receive(sock, REPLY_BYTES)))
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _receive(sock: socket.socket, length: int) -> bytes:
    received = bytearray()
    while len(received) < length:
        part = sock.recv(min(length - len(received), 1 << 20))
        if not part:
            raise ConnectionResetError("it hung up")
        received += part
    return bytes(received)


def _packed(value: dict[str, Any]) -> bytes:
    body = json.dumps(value).encode()
    return _LENGTH.pack(len(body)) + body
