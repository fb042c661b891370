"""One rank of a planned engine in a process of its own.

    python -m tutti.server.rank_process FOLDER ENGINE GENERATION RANK

The first rank talks to clients; all of them make the same steps.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from tutti.errors import TuttiError
from tutti.plan.files import load_plan
from tutti.plan.plan import Plan
from tutti.server.engine_process import beat, listening
from tutti.server.grammar import Grammars
from tutti.server.hosts.rank_hosts import seats_of
from tutti.server.messages import EngineState, ServerConfig, ServerFolder
from tutti.server.rank_broadcast import RankBroadcast, RankListener
from tutti.server.rank_loop import PlannedLoop, follow
from tutti.server.sockets import ServerSockets, SocketName

if TYPE_CHECKING:
    from tutti.serve.handover.sender import Address
    from tutti.serve.planned_rank import OpenRank

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Who:
    """Which process this is."""

    folder: ServerFolder
    engine: int
    generation: int
    rank: int


def main(who: Who) -> int:
    """Serve until SIGTERM."""
    own = who.folder
    path = own.heartbeat(who.engine, who.generation, who.rank)
    threading.Thread(target=beat, args=(path, os.getppid()), daemon=True).start()
    config = own.config()
    plan = load_plan(Path(config.plan))
    sockets = ServerSockets.of(own, config, seats_of(plan) if config.spread else None)
    try:
        opened = _open(who, config, plan, sockets)
    except TuttiError as error:
        own.write(own.failed(who.engine, who.generation).name, str(error))
        return 2
    named = config.engine.get("tokenizer") or config.folder
    grammars = Grammars(Path(named), opened.spec.vocab, opened.end)
    if who.rank:
        listener = RankListener(
            sockets, SocketName("follower", who.engine, who.generation, who.rank)
        )
        opened.meet()
        follow(opened.engine, listener, grammars)
        return 0
    return _lead(who, opened, grammars, sockets)


def _lead(who: Who, opened: OpenRank, grammars: Grammars, sockets: ServerSockets) -> int:
    own, engine, generation = who.folder, who.engine, who.generation
    others = range(1, opened.num_ranks)
    followers = RankBroadcast(
        sockets, [SocketName("follower", engine, generation, rank) for rank in others]
    )
    arrived: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
    sockets.bind(arrived, SocketName("arrived", engine, generation))
    socket, address = listening(sockets, SocketName("engine", engine, generation))

    def report() -> None:
        overrun = getattr(opened.accelerator, "overrun", None)
        if overrun is not None:
            own.write(own.overrun(engine).name, (overrun.due_s, overrun.late_s))

    loop = PlannedLoop(opened.engine, socket, grammars, followers, arrived, opened.takers, report)

    def stop(*_args: object) -> None:
        loop.stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor says when
    opened.meet()
    schedulers = opened.engine.schedulers
    ready = EngineState(
        number=engine,
        generation=generation,
        address=address,
        ready=True,
        context=schedulers[0].settings.max_length,
        vocab=opened.spec.vocab,
        slots=sum(scheduler.settings.slots for scheduler in schedulers),
        page_size=schedulers[0].settings.page_size,
    )
    own.write(own.ready(engine, generation).name, ready)
    loop.run()
    opened.close()
    return 0


def _open(who: Who, config: ServerConfig, plan: Plan, sockets: ServerSockets) -> OpenRank:
    from tutti.serve.planned_rank import open_rank

    return open_rank(
        config.folder,
        plan,
        who.engine,
        who.rank,
        generation=who.generation,
        dtype=config.engine.get("dtype"),
        keys=KeyWays(sockets),
        whole=Herald(sockets, SocketName("arrived", who.engine, who.generation), who.rank),
    )


class KeyWays:
    """The ways of keys and values, as `tutti.serve.handover` asks for them."""

    def __init__(self, sockets: ServerSockets) -> None:
        self._sockets = sockets

    def bind(self, socket: zmq.Socket[bytes], at: Address) -> None:
        """Let a rank take keys and values."""
        self._sockets.bind(socket, SocketName("keys", *at))

    def connect(self, socket: zmq.Socket[bytes], to: Address) -> None:
        """Let a rank send them."""
        self._sockets.connect(socket, SocketName("keys", *to))


class Herald:
    """Tells an engine's first rank of keys and values that are whole here; used by one thread."""

    def __init__(self, sockets: ServerSockets, name: SocketName, rank: int) -> None:
        self._sockets, self._name, self._rank = sockets, name, str(rank).encode()
        self._socket: zmq.Socket[bytes] | None = None

    def __call__(self, key: str) -> None:
        """Say it."""
        if self._socket is None:
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
            self._socket = context.socket(zmq.PUSH)
            self._sockets.connect(self._socket, self._name)
        self._socket.send_multipart([self._rank, key.encode()])


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    _words = sys.argv[1:]
    sys.exit(
        main(
            Who(
                folder=ServerFolder(Path(_words[0])),
                engine=int(_words[1]),
                generation=int(_words[2]),
                rank=int(_words[3]),
            )
        )
    )
