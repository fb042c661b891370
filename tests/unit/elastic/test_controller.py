"""The controller on its socket: who is refused, who is silent, what is given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.support.launching import plan_of
from tutti.document import Place
from tutti.elastic.controller import Controller, ControllerSettings
from tutti.elastic.events import Phase, Settle, Settled, Unsettled
from tutti.elastic.join import JOB_FILE, run_agent
from tutti.elastic.journal import Journal, read_journal
from tutti.elastic.membership import Membership
from tutti.elastic.messages import (
    VERSION,
    HeardWords,
    Hello,
    Message,
    Order,
    Refusal,
    Report,
    Seat,
    Source,
    Standing,
    Status,
    Welcome,
    Words,
    control_key,
    packed,
    unpacked,
)
from tutti.errors import InputError
from tutti.files import write_text
from tutti.hardware.cluster import Cluster
from tutti.plan.chips import ChipSet
from tutti.plan.files import plan_hash, save_plan
from tutti.plan.plan import Replica
from tutti.ranks.local_capacity import require_node_here

SECRET = b"what-the-agents-of-tests-know-00"
KEY = control_key(SECRET)


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
        values = {"incarnation": 1, "reports": reports, "version": VERSION, **changes}
        self.send(Status(job=job, host=self.host, number=self.number, **values))

    def send(self, message: Message, key: bytes = KEY) -> None:
        self.socket.send(packed(message, key))

    def heard(self) -> list[Message]:
        found = []
        while self.socket.poll(0):
            found.append(unpacked(self.socket.recv(), KEY))
        return found

    def order(self) -> Order | None:
        found = [message for message in self.heard() if isinstance(message, Order)]
        return found[-1] if found else None

    def close(self) -> None:
        self.socket.close()
        self.context.term()


def settle(question: Settle, members: Membership) -> Settled | Unsettled:
    if len(question.chips) < 2:
        return Unsettled(question.request, f"{len(question.chips)} of 2 chips")
    return Settled(question.request, question.chips, "plan", Source(kind="begin"))


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    settings = ControllerSettings(job="job", key=KEY, death_after_s=0.3, wait_s=0.5)
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


def turned(controller: Controller, peer: Peer, count: int) -> list[Message]:
    """Return the next messages to a peer."""
    found, limit = list[Message](), time.monotonic() + 10
    while len(found) < count:
        assert time.monotonic() < limit, found
        controller.turn()
        found += peer.heard()
    return found


def test_an_agent_is_welcomed_or_told_why_not(controller: Controller) -> None:
    welcome = Welcome(job="job", folder="f", chips=("p/1/0",), world=2, heartbeat_s=0.2, wait_s=9.0,
                      plan_hash="")  # fmt: skip
    controller.admit = lambda hello: welcome if hello.node == "p/1" else "no such node"
    peer = Peer(controller, "p/1")
    peer.send(Hello(node="p/1"))
    peer.send(Hello(node="p/7"))
    peer.send(Hello(node="p/1", version=99))
    peer.send(Hello(node="p/1"), key=control_key(b"another secret"))
    peer.say("p/1/0")
    peer.send(Hello(node="p/1"))
    found = turned(controller, peer, 5)
    assert found[0] == welcome
    whys = [message.why for message in found[1:] if isinstance(message, Refusal)]
    assert whys == [
        "no such node",
        f"its messages are of version 99, those of this job of {VERSION}",
        "another secret",
        "node p/1 has an agent already",
    ]
    peer.close()


def refusal(controller: Controller, welcome: Welcome, folder: Path) -> str:
    """Return why an agent that was welcomed does not join."""
    controller.admit = lambda _hello: welcome
    failed = list[str]()

    def join() -> None:
        try:
            address = controller.address.removeprefix("tcp://")
            run_agent(address, "p/1", folder=folder, say=failed.append, wait_s=5.0)
        except InputError as error:
            failed.append(str(error))

    thread = threading.Thread(target=join)
    thread.start()
    while thread.is_alive():
        controller.turn()
    (line,) = failed
    assert "\n" not in line
    return line


@pytest.mark.parametrize("fault", ["job", "plan", "chips", "fewer"])
def test_an_agent_elsewhere_than_it_thinks_is_refused_in_one_line(
    fault: str, controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of another job, a copy with another plan, a host that is another node."""
    monkeypatch.setenv("TUTTI_SECRET", SECRET.decode())
    document = {"name": "two", "pools": [{"name": "p", "chip": "A100-80", "nodes": 2}]}
    cluster = Cluster.from_document(document, Place("two"))
    plan = plan_of(cluster, [[Replica(chips=ChipSet.of("p/0/0-7"), count=8)]])
    save_plan(plan, tmp_path / "plan.json")
    write_text(tmp_path / JOB_FILE, "another\n" if fault == "job" else "job\n")
    job = replace(plan.job, global_batch=2 * plan.job.global_batch)
    led = replace(plan, job=job) if fault == "plan" else plan
    devices = {"chips": (8, "NVIDIA H100 80GB HBM3"), "fewer": (4, "NVIDIA A100-SXM4-80GB")}
    count, name = devices.get(fault, (8, "NVIDIA A100-SXM4-80GB"))
    tool = "".join(f"{index}, {name}, 81920\n" for index in range(count))
    monkeypatch.setattr(
        "tutti.elastic.join.require_node_here",
        lambda *given: require_node_here(
            *given, run=lambda command: tool if "nvidia-smi --query" in " ".join(command) else ""
        ),
    )
    welcome = Welcome(
        job="job", folder="f", chips=("p/1/0",), world=2, heartbeat_s=0.2, wait_s=9.0,
        plan_hash=plan_hash(led),
    )  # fmt: skip
    said = refusal(controller, welcome, tmp_path)
    expected = {
        "job": f"{tmp_path}: is the folder of job another, and",
        "plan": f"is another plan (hash {plan_hash(plan)}) than that of the job at",
        "chips": "node p/1: the cluster file says 8 × A100-80 of 80.0 GiB, this host has 8 × H100",
        "fewer": "node p/1: the cluster file says 8 × A100-80 of 80.0 GiB, this host has 4 × A100",
    }
    assert expected[fault] in said
    assert "--run" in said or "--node" in said


def test_who_got_further_than_the_log_says_is_still_told_what_to_do(controller: Controller) -> None:
    """The leader before this one died between an order and its line in the log."""
    one, other = Peer(controller, "a"), Peer(controller, "b")
    one.say("p/0/0", order=7)
    until(controller, Phase.ENTERING, (other, ["p/1/0"]))
    assert controller.members.order > 7
    one.close()
    other.close()


def test_words_are_heard_once_and_in_order(tmp_path: Path) -> None:
    words = [(1, 1), (1, 1), (3, 2), (2, 2), (3, 2)]
    acknowledged, heard = said_words(tmp_path, words, confirmed=4)
    assert acknowledged == [1, 1, 2, 3]
    assert heard == [1, 2, 3]


def test_a_new_controller_waits_for_words_that_were_lost_on_their_way_to_the_old(
    tmp_path: Path,
) -> None:
    """7 and 8 were sent to one that died; 9 is the first that comes, and 7 to 9 come again."""
    acknowledged, heard = said_words(tmp_path, [(9, 7), (7, 7), (8, 7), (9, 7)], confirmed=3)
    assert heard == [7, 8, 9]
    assert acknowledged == [7, 8, 9]


def test_words_that_an_agent_could_not_keep_are_not_waited_for(tmp_path: Path) -> None:
    _, heard = said_words(tmp_path, [(1, 1), (12, 12), (13, 12)], confirmed=3)
    assert heard == [1, 12, 13]


def said_words(
    folder: Path, words: Sequence[tuple[int, int]], *, confirmed: int
) -> tuple[list[int], list[int]]:
    """Say words (number, first of those not heard); return what was confirmed, and heard."""
    heard: list[int] = []
    journal = Journal(folder)
    settings = ControllerSettings(job="job", key=KEY)
    controller = Controller(
        settings, journal, settle, lambda *_: "here:1",
        lambda rank, chip, kind, values: heard.append(values["n"]),
    )  # fmt: skip
    peer = Peer(controller, "a")
    for number, first in words:
        peer.send(
            Words(
                job="job", host="a", incarnation=5, number=number, first=first, chip="p/0/0",
                process=1, values={"kind": "warning", "n": number},
            )
        )  # fmt: skip
    came = [m.number for m in turned(controller, peer, confirmed) if isinstance(m, HeardWords)]
    peer.close()
    controller.close()
    journal.close()
    return came, heard


def test_what_a_seat_did_in_a_generation_that_is_over_is_still_heard(tmp_path: Path) -> None:
    """A step that a rank finishes alone is told when nobody trains; it must not be lost."""
    heard: list[tuple[str, int]] = []
    journal = Journal(tmp_path)
    controller = Controller(
        ControllerSettings(job="job", key=KEY, wait_s=60.0), journal, settle, lambda *_: "here:1",
        lambda rank, chip, kind, values: heard.extend(
            [(chip, values["step"])] if kind == "step" else []),
    )  # fmt: skip
    one, other = Peer(controller, "a"), Peer(controller, "b")
    until(controller, Phase.ENTERING, (one, ["p/0/0"]), (other, ["p/1/0"]))
    until(controller, Phase.WAITING, (one, ["p/0/0"]))  # the other is silent
    for step, process, late in ((5, 1, True), (6, 1, False), (7, 2, True)):
        values = {"kind": "step", "step": step, "generation": 1, "late": late}
        controller._rank_said("p/0/0", process, values)
    # not what is no longer its to say, nor the words of a process that has no seat
    assert heard == [("p/0/0", 5)]
    one.close()
    other.close()
    controller.close()
    journal.close()


def test_steps_told_to_a_controller_that_was_lost_are_heard_by_the_next(tmp_path: Path) -> None:
    """They come again after a second; by then the next generation may be settled."""
    heard: list[tuple[int, bool]] = []
    journal = Journal(tmp_path)
    controller = Controller(
        ControllerSettings(job="job", key=KEY, wait_s=60.0), journal, settle, lambda *_: "here:1",
        lambda rank, chip, kind, values: heard.append((values["step"], values.get("late", False))),
    )  # fmt: skip
    seats = (Seat(rank=0, chip="p/0/0", host="a", process=1),)
    members = Membership(job="job", generation=4, phase=Phase.SETTLING, seats=seats)
    controller.restore(members)
    controller.members = replace(members, phase=Phase.ENTERING, generation=5)
    for step, generation, process in ((7, 4, 1), (8, 5, 1), (9, 4, 2), (10, 6, 1)):
        values = {"kind": "step", "step": step, "generation": generation}
        controller._rank_said("p/0/0", process, values)
    assert heard == [(7, True), (8, False)]
    controller.close()
    journal.close()


def test_an_address_that_is_not_of_this_host_is_an_error_of_the_system(tmp_path: Path) -> None:
    """Whoever made the settings says which of them it is."""
    settings = ControllerSettings(job="job", key=KEY, bind="tcp://203.0.113.9:5000")
    journal = Journal(tmp_path)
    with pytest.raises(OSError, match="Cannot assign requested address"):
        Controller(settings, journal, settle, lambda *_: "here:1", lambda *_: None)
    journal.close()
