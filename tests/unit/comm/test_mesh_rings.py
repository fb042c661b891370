"""Shared memory of a rank that is gone: the device keeps it until all is closed."""

from __future__ import annotations

import mmap
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.comm.test_mesh_numbers import mesh_with
from tutti.comm.entry.trust import Key, Secret
from tutti.comm.frames import Frame, Kind, Tag
from tutti.comm.mesh import _Incoming
from tutti.comm.move import Buffers, HostMover
from tutti.comm.transport.link import LinkOwner, Settings
from tutti.comm.transport.shared import SharedReader

BYTES = mmap.PAGESIZE


def test_memory_of_a_lost_rank_is_pinned_until_the_mesh_closes() -> None:
    pinned: set[int] = set()
    taken: list[torch.Tensor] = []

    def pin(memory: torch.Tensor) -> bool:
        pinned.add(memory.data_ptr())
        return True

    owner: Any = SimpleNamespace(pin=pin, unpin=lambda memory: pinned.remove(memory.data_ptr()))
    told: list[str] = []
    mesh = mesh_with(told)
    mesh._doors, mesh._outs, mesh._inboxes = [], {}, {}
    mesh._listeners = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
    incoming = _Incoming(3, reader=SharedReader(mmap.mmap(-1, BYTES), owner))
    mesh._incoming.append(incoming)
    frame = Frame(Kind.SHARED, Tag(0, 0), total=8, length=8, place=0)
    inbox: Any = SimpleNamespace(
        spill=lambda place: None, take=lambda frame, source, then: taken.append(source)
    )
    assert incoming.reader is not None
    incoming.reader.arrived(frame, None, inbox)  # type: ignore[arg-type]
    (piece,) = taken
    assert pinned == {piece.data_ptr()}

    mesh._closed(incoming, "broke the connection")
    assert told == ["broken 3: broke the connection"]
    assert mesh._incoming == []
    assert pinned == {piece.data_ptr()}  # it may be copied yet

    mesh.close()
    assert pinned == set()


@pytest.mark.parametrize("lost", [False, True])
def test_memory_shared_with_a_killed_rank_is_given_back_later(lost: bool) -> None:
    happened: list[str] = []

    def told(name: str) -> Any:
        return lambda *_: happened.append(name)

    accelerator: Any = SimpleNamespace(unpin=told("at once"), unpin_later=told("later"))
    owner = LinkOwner(
        rank=0, key=Key(Secret(bytes(32))), settings=Settings(), reactor=None,
        host_mover=HostMover(), device_mover=SimpleNamespace(drain=told("drained")),
        accelerator=accelerator, buffers=Buffers(), replied=told("reply"), broken=told("break"),
        lost=lost,
    )  # type: ignore[arg-type]  # fmt: skip
    owner.unpin(torch.empty(8))
    assert happened == ["drained", "later" if lost else "at once"]
