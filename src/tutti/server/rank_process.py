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
from tutti.server.crew import Crew, Ear
from tutti.server.engine_process import beat, listening
from tutti.server.grammar import Grammars
from tutti.server.messages import EngineState, ServerConfig, ServerFolder
from tutti.server.rank_loop import PlannedLoop, follow

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
    try:
        opened = _open(who, config)
    except TuttiError as error:
        own.write(own.failed(who.engine, who.generation).name, str(error))
        return 2
    named = config.engine.get("tokenizer") or config.folder
    grammars = Grammars(Path(named), opened.spec.vocab, opened.end)
    if who.rank:
        ear = Ear(own.crew_socket(who.engine, who.generation, who.rank))
        opened.meet()
        follow(opened.engine, ear, grammars)
        return 0
    return _lead(who, opened, grammars)


def _lead(who: Who, opened: OpenRank, grammars: Grammars) -> int:
    own, engine, generation = who.folder, who.engine, who.generation
    crew = Crew([own.crew_socket(engine, generation, r) for r in range(1, opened.num_ranks)])
    arrived: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
    arrived.bind(own.arrived_socket(engine, generation))
    socket = listening(own.engine_socket(engine, generation))

    def report() -> None:
        overrun = getattr(opened.accelerator, "overrun", None)
        if overrun is not None:
            own.write(own.overrun(engine).name, (overrun.due_s, overrun.late_s))

    loop = PlannedLoop(opened.engine, socket, grammars, crew, arrived, opened.takers, report)

    def stop(*_args: object) -> None:
        loop.stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor says when
    opened.meet()
    schedulers = opened.engine.schedulers
    ready = EngineState(
        number=engine,
        generation=generation,
        address=own.engine_socket(engine, generation),
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


def _open(who: Who, config: ServerConfig) -> OpenRank:
    from tutti.serve.planned_rank import open_rank

    own = who.folder

    def keys_at(to: Address) -> str:
        return own.keys_socket(*to)

    return open_rank(
        config.folder,
        load_plan(Path(config.plan)),
        who.engine,
        who.rank,
        generation=who.generation,
        dtype=config.engine.get("dtype"),
        keys_at=keys_at,
        whole=Herald(own.arrived_socket(who.engine, who.generation), who.rank),
    )


class Herald:
    """Tells an engine's first rank of keys and values that are whole here; used by one thread."""

    def __init__(self, address: str, rank: int) -> None:
        self._address, self._rank = address, str(rank).encode()
        self._socket: zmq.Socket[bytes] | None = None

    def __call__(self, key: str) -> None:
        """Say it."""
        if self._socket is None:
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
            self._socket = context.socket(zmq.PUSH)
            self._socket.connect(self._address)
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
