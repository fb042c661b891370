"""Agents go with whoever leads: no word is lost, and one that cannot lead lets others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import zmq

from tutti.elastic.controller_link import ControllerLink
from tutti.elastic.etcd_follower import LOOK_S, Candidate, Follower
from tutti.elastic.journal import Entry
from tutti.elastic.messages import HeardWords, Words, control_key, packed, unpacked
from tutti.elastic.store import EtcdStore

KEY = control_key(b"what-the-agents-of-tests-know-00")


class Listening:
    """A controller's socket."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("tcp://127.0.0.1:*")
        self.address: str = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.peer = b""

    def words(self, count: int) -> list[int]:
        found, limit = list[int](), time.monotonic() + 10
        while len(found) < count:
            assert time.monotonic() < limit, found
            if self.socket.poll(20):
                self.peer, data = self.socket.recv_multipart()
                message = unpacked(data, KEY)
                assert isinstance(message, Words)
                found.append(message.number)
        return found

    def confirm(self, number: int) -> None:
        heard = HeardWords(job="job", incarnation=1, number=number)
        self.socket.send_multipart([self.peer, packed(heard, KEY)])

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def listening() -> Iterator[list[Listening]]:
    made = [Listening(), Listening()]
    yield made
    for one in made:
        one.close()


def test_a_new_controller_hears_first_what_the_old_one_did_not(listening: list[Listening]) -> None:
    old, new = listening
    link = ControllerLink(old.address, KEY, "job", "host", 1)
    link.words("p/0/0", 1, {"kind": "step", "step": 1})
    assert old.words(1) == [1]
    old.confirm(1)
    limit = time.monotonic() + 10
    while link._waiting:
        assert list(link.messages()) == []
        assert time.monotonic() < limit
    for step in (2, 3):  # nobody leads
        link.words("p/0/0", 1, {"kind": "step", "step": step})
    link.follow(new.address)
    link.words("p/0/0", 1, {"kind": "step", "step": 4})
    assert new.words(3) == [2, 3, 4]
    link.follow(new.address)  # it is told so now and then
    link.words("p/0/0", 1, {"kind": "step", "step": 5})
    assert new.words(1) == [5]
    link.close()


class NobodyLeads:
    """A store of a job that nobody leads."""

    def __init__(self) -> None:
        self.url, self.stood = "etcd://h:1/job", list[str]()

    def leader(self) -> None:
        return None

    def last(self) -> Entry:
        return Entry(at=1.0, generation=1, phase="running", why="so")

    def stand(self, node: str) -> bool:
        self.stood.append(f"{node} stands")
        return True

    def stand_down(self) -> None:
        self.stood.append("down")


def test_a_host_that_cannot_start_a_leader_stays_an_agent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, own = NobodyLeads(), tmp_path / "run"  # no folder for logs
    host = Candidate(node="p/0", folder=own, address="127.0.0.1", environment={})
    follower = Follower(cast("EtcdStore", store), host, lambda _address: None)
    for _ in range(2):
        follower.look()
        assert store.stood == ["p/0 stands", "down"]  # others may, and it does not try at once
        time.sleep(LOOK_S)
    assert "node p/0 cannot lead: [Errno 2]" in capsys.readouterr().err
    follower.close()
