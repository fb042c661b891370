"""Connections that their sender gave up: what they bring is counted once, early or late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tutti.comm.frames import Frame, Kind
from tutti.comm.mesh import Events, Mesh, _Incoming


class Socket:
    """A connection in, of which only the end matters."""

    unfinished = None

    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True

    def send(self, views: Any) -> None:
        pass


def mesh_with(told: list[str], *, resend_bytes: int = 1 << 20) -> Mesh:
    def nothing(*_: Any) -> None:
        pass

    events = Events(
        control=nothing,
        broken=lambda peer, reason: told.append(f"broken {peer}: {reason}"),
        failed=nothing,
        doubted=lambda peer, reason: told.append(f"doubted {peer}: {reason}"),
    )
    owner: Any = SimpleNamespace(
        settings=SimpleNamespace(resend_bytes=resend_bytes),
        reactor=SimpleNamespace(after=nothing),
        rank=0,
    )
    mesh = Mesh.__new__(Mesh)
    mesh._owner, mesh._events = owner, events
    mesh._incoming, mesh._came, mesh._left, mesh._ended = [], {}, set(), []
    return mesh


def connection(mesh: Mesh, number: int | None) -> _Incoming:
    incoming: Any = _Incoming(3)
    incoming.connection = Socket()
    mesh._incoming.append(incoming)
    if number is not None:
        mesh._arrived(incoming, Frame(Kind.OPEN, place=number))
    return incoming


def test_frames_of_a_connection_are_counted_until_its_sender_gives_it_up():
    mesh = mesh_with([])
    incoming = connection(mesh, 1)
    for _ in range(3):
        incoming.arrivals.note(8)
    assert mesh._end_of(3, 1) == 3
    assert incoming.connection.aborted
    assert mesh._end_of(3, 1) == 3  # asked again, the same answer


def test_a_connection_that_was_given_up_before_it_was_read_brings_nothing():
    mesh = mesh_with([])
    late = connection(mesh, None)  # its proof is here, its number still in the kernel
    assert mesh._end_of(3, 7) == 0
    mesh._arrived(late, Frame(Kind.OPEN, place=7))
    assert late.connection.aborted
    assert late not in mesh._incoming
    other = connection(mesh, 8)
    assert not other.connection.aborted


def test_a_connection_that_ends_before_its_number_came_blames_nobody():
    told: list[str] = []
    mesh = mesh_with(told)
    mesh._closed(connection(mesh, None), "closed the connection")
    assert told == ["doubted 3: closed the connection"]
    without = mesh_with(told, resend_bytes=0)
    without._closed(connection(without, None), "closed the connection")
    assert told[1:] == ["broken 3: closed the connection"]
