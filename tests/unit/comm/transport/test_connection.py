"""Frames on a socket whose other end is gone."""

from __future__ import annotations

import socket
import threading

from tutti.comm import frames
from tutti.comm.frames import Frame, Kind
from tutti.comm.reactor import Reactor
from tutti.comm.transport.connection import Connection, Handler


def test_what_the_other_side_said_last_is_heard_though_it_can_be_told_nothing() -> None:
    """It sends its goodbye and closes; an answer to something earlier then finds nobody."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    heard: list[Kind] = []
    over = threading.Event()
    reasons: list[str] = []

    def closed(reason: str) -> None:
        reasons.append(reason)
        over.set()

    handler = Handler(
        room=lambda frame: [memoryview(bytearray(frame.length))],
        arrived=lambda frame: heard.append(frame.kind),
        closed=closed,
    )
    reactor = Reactor("test")

    def begin() -> None:
        connection = Connection(reactor, ours, handler)
        theirs.sendall(frames.message(Kind.STATUS, {"entered": {}})[0])
        theirs.sendall(frames.message(Kind.BYE)[0])
        theirs.close()
        connection.send([memoryview(Frame(Kind.FREE).pack())])

    try:
        reactor.call(begin)
        assert over.wait(5.0)
    finally:
        reactor.stop()
    assert heard == [Kind.STATUS, Kind.BYE]
    assert reasons == ["closed the connection"]
