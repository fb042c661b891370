"""`Hosts`: the front's side of the agents: who is there, and which engines are to run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from tutti.elastic.join import own_address, zmq_address
from tutti.errors import InputError, hint
from tutti.server.hosts import messages
from tutti.server.hosts.facts import require_same
from tutti.server.hosts.messages import (
    BEAT_S,
    CONTROL,
    LOST_S,
    Facts,
    Join,
    RankStatus,
    Refusal,
    Status,
    Wanted,
    Welcome,
)
from tutti.server.messages import HostAddress
from tutti.server.sockets import listen_by

log = logging.getLogger(__name__)
QUIET_S = 2.0  # after which another agent may take a host's place


@dataclass(slots=True)
class _Member:
    identity: bytes
    incarnation: str
    at: HostAddress
    heard: float
    ranks: dict[tuple[int, int, int], RankStatus] = field(default_factory=dict)


class Hosts:
    """The hosts of a deployment, as far as they were heard of."""

    def __init__(
        self,
        listen: tuple[str, int],
        secret: bytes,
        facts: Facts,
        names: Sequence[str],
        options: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._facts, self._names, self._options = facts, list(names), dict(options)
        self._clock = clock
        self._members: dict[str, _Member] = {}
        self._wanted: dict[int, int] = {}
        self._said, self._changed = 0.0, False
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        listen_by(self._socket, secret, CONTROL)
        address = zmq_address(own_address(listen[0]), listen[1])
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close(0)
            raise InputError(
                f"serve: hosts cannot be awaited at {listen[0]}:{listen[1]} "
                f"({error.strerror}); choose another with --listen"
            ) from None

    def close(self) -> None:
        """Let agents end what they run, and leave."""
        self._tell(ending=True)
        self._socket.close()

    # --- what groups ask -------------------------------------------------------------------

    def incarnation(self, host: str) -> str:
        """Return which start of an agent a host has; empty: it is not there."""
        member = self._members.get(host)
        return "" if member is None else member.incarnation

    def status(self, host: str, engine: int, generation: int, rank: int) -> RankStatus | None:
        """Return how a rank is; None: nothing was heard of it yet."""
        member = self._members.get(host)
        return None if member is None else member.ranks.get((engine, generation, rank))

    def want(self, engine: int, generation: int | None) -> None:
        """Let an engine run in this generation, and no other; None: let it end."""
        if generation is None:
            self._wanted.pop(engine, None)
        else:
            self._wanted[engine] = generation
        self._changed = True

    def missing(self) -> list[str]:
        """Return the hosts that are not there."""
        return [name for name in self._names if name not in self._members]

    # --- words -----------------------------------------------------------------------------

    def look(self) -> list[str]:
        """Hear what agents say, and say what is wanted; return what changed, as a user reads it."""
        news = []
        while self._socket.poll(0):
            identity, data = self._socket.recv_multipart()
            try:
                said = messages.from_host(data)
            except msgspec.DecodeError as error:
                log.warning("a message that is none: %s", error)
                continue
            line = self._joined(identity, said) if isinstance(said, Join) else self._heard(said)
            news += [line] if line else []
        now = self._clock()
        for name, member in list(self._members.items()):
            if now - member.heard > LOST_S:
                news.append(self._left(name, f"was not heard of for {now - member.heard:.0f} s"))
        if self._changed or now - self._said > BEAT_S:
            self._tell()
        return news

    def _joined(self, identity: bytes, said: Join) -> str | None:
        if said.host not in self._names:
            known = hint(said.host, self._names)
            self._refuse(identity, f"serve: the plan has no engines on '{said.host}'; {known}")
            return None
        try:
            require_same(self._facts, said.facts, said.host)
        except InputError as error:
            self._refuse(identity, str(error))
            return f"{said.host} at {said.at.address} was refused: {error}"
        other = self._members.get(said.host)
        if other is not None and other.incarnation != said.incarnation:
            if self._clock() - other.heard < QUIET_S:
                text = f"serve: {said.host} is there already, at {other.at.address}"
                self._refuse(identity, text, later=True)
                return None
            self._left(said.host, "came anew")
        again = said.host in self._members
        self._members[said.host] = _Member(identity, said.incarnation, said.at, self._clock())
        self._send(identity, Welcome(engine=self._options))
        self._changed = True
        return None if again else f"{said.host} joined from {said.at.address}"

    def _heard(self, said: Status) -> str | None:
        member = self._members.get(said.host)
        if member is None or member.incarnation != said.incarnation:
            return None  # the agent hears nothing, ends its engines and joins again
        if said.leaving:
            return self._left(said.host, "left")
        member.heard = self._clock()
        member.ranks = {(own.engine, own.generation, own.rank): own for own in said.ranks}
        return None

    def _left(self, name: str, why: str) -> str:
        del self._members[name]
        self._changed = True
        return f"{name} {why}"

    def _refuse(self, identity: bytes, message: str, *, later: bool = False) -> None:
        self._send(identity, Refusal(message=message, later=later))

    def _tell(self, *, ending: bool = False) -> None:
        self._said, self._changed = self._clock(), False
        where = {name: member.at for name, member in self._members.items()}
        wanted = Wanted(engines=self._wanted, hosts=where, ending=ending)
        for member in self._members.values():
            self._send(member.identity, wanted)

    def _send(self, identity: bytes, said: messages.ToHost) -> None:
        self._socket.send_multipart([identity, messages.encode(said)])
