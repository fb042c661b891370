"""Where the sockets of a server's processes are, and who may use them.

On one machine they are files in the server's folder, which only this user can enter. On several
they are TCP with CurveZMQ keys made of the job's secret, the engine and its generation. A
listener's public key is never sent, so who does not know the secret completes no handshake; nor
does a process of an earlier generation. Needs no torch.
"""

from __future__ import annotations

import hmac
import os
from typing import Any, Literal, NamedTuple

import zmq
import zmq.utils.z85

from tutti.launch.secret import find_secret
from tutti.server.hosts.rank_hosts import PORTS_EACH, Seats
from tutti.server.messages import HostAddress, ServerConfig, ServerFolder

Kind = Literal["engine", "follower", "arrived", "keys", "meeting"]
KINDS: tuple[Kind, ...] = ("engine", "follower", "arrived", "keys", "meeting")
assert len(KINDS) == PORTS_EACH
HEARTBEAT_MS = 2000
SILENT_MS = 6000


class SocketName(NamedTuple):
    """One socket: what it is for, and whose it is.

    `engine`: clients find an engine there. `follower`: a rank hears its first one. `arrived`: the
    first rank hears whose keys and values are whole. `keys`: a rank takes keys and values.
    `meeting`: the ranks of an engine find each other there.
    """

    kind: Kind
    engine: int
    generation: int
    rank: int = 0


class ServerSockets:
    """Binds and connects the sockets of one process."""

    def __init__(
        self, folder: ServerFolder, secret: bytes | None = None, seats: Seats | None = None
    ) -> None:
        """`secret`: engines are on several hosts; `seats` then say which rank is on which."""
        self._folder, self._secret, self._seats = folder, secret, seats

    @classmethod
    def of(
        cls, folder: ServerFolder, config: ServerConfig, seats: Seats | None = None
    ) -> ServerSockets:
        """Return the sockets of a server's process."""
        return cls(folder, shared_secret() if config.spread else None, seats)

    def address(self, name: SocketName) -> str:
        """Return where a socket is now: a host that was started anew may have another address."""
        if self._secret is None:
            return self._folder.socket("-".join(map(str, name)))
        assert self._seats is not None
        seat = self._seats[name.engine, name.rank]
        return port_address(self._folder.hosts()[seat.host], seat.local, name.kind)

    def bind(self, socket: zmq.Socket[bytes], name: SocketName) -> str:
        """Let a socket listen; return where."""
        address = self.address(name)
        if self._secret is not None:
            listen_by(socket, self._secret, _scope(name))
        socket.bind(address)
        return address

    def connect(self, socket: zmq.Socket[Any], name: SocketName, address: str = "") -> None:
        """Let a socket call; `address`: where it was said to be."""
        if self._secret is not None:
            call_by(socket, self._secret, _scope(name))
        socket.connect(address or self.address(name))


def shared_secret() -> bytes:
    """Return what all hosts of this server know; say what to do where there is nothing."""
    return find_secret(os.environ, 2).reveal()


def port_address(host: HostAddress, local: int, kind: Kind) -> str:
    """Return where one of the sockets of a host's rank is."""
    shown = f"[{host.address}]" if ":" in host.address else host.address
    return f"tcp://{shown}:{host.ports + PORTS_EACH * local + KINDS.index(kind)}"


def _scope(name: SocketName) -> str:
    return f"{name.engine}/{name.generation}"


def listen_by(socket: zmq.Socket[Any], secret: bytes, scope: str) -> None:
    """Let those alone be heard who know the secret."""
    private, _ = _keys(secret, scope)
    _common(socket)
    socket.curve_secretkey = private
    socket.curve_server = True


def call_by(socket: zmq.Socket[Any], secret: bytes, scope: str) -> None:
    """Talk to those alone who know the secret."""
    _, public = _keys(secret, scope)
    _common(socket)
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = public


def _common(socket: zmq.Socket[Any]) -> None:
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)


def _keys(secret: bytes, scope: str) -> tuple[bytes, bytes]:
    private = zmq.utils.z85.encode(hmac.digest(secret, f"tutti serve {scope}".encode(), "sha256"))
    return private, zmq.curve_public(private)
