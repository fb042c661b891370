"""The controller on its socket: who is refused, who is silent, what is given up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tutti.elastic.controller import Controller, ControllerSettings
from tutti.elastic.events import Phase, Settle, Settled, Unsettled
from tutti.elastic.journal import Journal, read_journal
from tutti.elastic.membership import Membership
from tutti.elastic.messages import Order, Report, Source, Standing, Status, packed, unpacked


class Peer:
    """An agent that says what it is told to say."""

    def __init__(self, controller: Controller, host: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(controller.address)
        self.host, self.number = host, 0

    def say(self, *chips: str, job: str = "job", **changes: Any) -> None:
        self.number += 1
        reports = tuple(Report(chip=c, process=1, standing=Standing.IDLE) for c in chips)
        values = {"incarnation": 1, "reports": reports, "version": 1, **changes}
        self.socket.send(packed(Status(job=job, host=self.host, number=self.number, **values)))

    def order(self) -> Order | None:
        found = None
        while self.socket.poll(0):
            found = unpacked(self.socket.recv())
        assert found is None or isinstance(found, Order)
        return found

    def close(self) -> None:
        self.socket.close()
        self.context.term()


def settle(question: Settle, members: Membership) -> Settled | Unsettled:
    if len(question.chips) < 2:
        return Unsettled(question.request, f"{len(question.chips)} of 2 chips")
    return Settled(question.request, question.chips, "plan", Source(kind="begin"))


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    settings = ControllerSettings(job="job", death_after_s=0.3, wait_s=0.5)
    journal = Journal(tmp_path)
    made = Controller(settings, journal, settle, lambda *_: "here:1", lambda *_: None)
    yield made
    made.close()
    journal.close()


def until(controller: Controller, phase: Phase, *say: Any) -> None:
    limit = time.monotonic() + 10
    while controller.members.phase is not phase:
        assert time.monotonic() < limit, controller.members.phase
        for peer, chips in say:
            peer.say(*chips, order=controller.members.order)
        controller.turn()


def test_agents_come_one_falls_silent_and_waiting_ends(
    controller: Controller, tmp_path: Path
) -> None:
    one, other = Peer(controller, "a"), Peer(controller, "b")
    until(controller, Phase.ENTERING, (one, ["p/0/0"]), (other, ["p/1/0"]))
    until(controller, Phase.GIVEN_UP, (one, ["p/0/0"]))  # the other one says nothing any more
    assert controller.members.why == "1 of 2 chips"
    whys = [entry.why for entry in read_journal(tmp_path) if entry.phase == "leaving"]
    assert whys[0] == "rank 1 (p/1/0): host b is silent"
    order = one.order()
    assert order is not None
    one.close()
    other.close()


def test_strangers_are_refused_in_words(controller: Controller) -> None:
    peers = [Peer(controller, host) for host in "abcd"]
    peers[0].say("p/0/0")
    peers[1].say("p/1/0", job="another")
    peers[2].say("p/1/0", version=99)
    limit = time.monotonic() + 10
    while len(controller.refused) < 2 and time.monotonic() < limit:
        controller.turn()
    while controller.members.host("a") is None and time.monotonic() < limit:
        controller.turn()
    peers[3].say("p/0/0")
    while len(controller.refused) < 3 and time.monotonic() < limit:
        peers[0].say("p/0/0")
        controller.turn()
    assert controller.refused == {
        "b": "agent of host b: another job",
        "c": "agent of host c: another version",
        "d": "chip p/0/0 is claimed by hosts a and d",
    }
    for peer in peers:
        peer.socket.send(b"nonsense")
        peer.close()
    controller.turn()
