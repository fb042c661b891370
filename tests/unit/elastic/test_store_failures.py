"""The store in etcd when answers are lost, members are cut off, and leases run out unnoticed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.etcd import EtcdServer
from tests.support.lossy_member import Member, deaf_after
from tutti.elastic import store as stores
from tutti.elastic.etcd import Etcd, StoreAwayError, StoreRefusedError
from tutti.elastic.journal import Entry, last_generation
from tutti.elastic.store import EtcdJournal, EtcdStore, Lead, LeadingHost, LostLeadError
from tutti.errors import StoppedError

ONE = LeadingHost(address="tcp://h:1", node="p/0")
OTHER = LeadingHost(address="tcp://h:2", node="p/1")
ENTRY = Entry(at=1.0, generation=1, phase="running", why="so")
AWAY = StoreAwayError("no etcd answers (as a test says)")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Lead]]:
    """Make leads whose thread looks once a minute: a test does what it would."""
    leads = list[Lead]()
    monkeypatch.setattr(stores, "LEASE_S", 240)

    def make(store: EtcdStore, leader: LeadingHost = ONE) -> Lead:
        leads.append(Lead(store, leader))
        return leads[-1]

    yield make
    for lead in leads:
        lead.close()


@pytest.fixture
def members() -> Iterator[Callable[[Any], Member]]:
    there = list[Member]()

    def make(says: Any) -> Member:
        there.append(Member(says))
        return there[-1]

    yield make
    for member in there:
        member.close()


def loses(store: EtcdStore, monkeypatch: pytest.MonkeyPatch, what: str, times: int = 1) -> None:
    """Lose the answers to the next requests of a kind, after they were carried out."""
    asked, left = store._etcd._ask, [times]

    def ask(path: str, body: Any) -> dict[str, Any]:
        answer = asked(path, body)
        if path == what and left[0] > 0:
            left[0] -= 1
            raise AWAY
        return answer

    monkeypatch.setattr(store._etcd, "_ask", ask)


# --- what is final, and what may pass ---------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (503, {"error": "etcdserver: no leader", "message": "etcdserver: no leader", "code": 14}),
        (503, {"error": "etcdserver: leader changed", "code": 14}),
        (500, {"message": "etcdserver: server stopped", "code": 14}),
        (429, {"error": "etcdserver: too many requests", "code": 8}),
        (504, {"message": "context deadline exceeded"}),
        (200, {"error": {"grpc_code": 14, "message": "etcdserver: no leader"}}),
        (200, {"error": {"code": 14, "message": "etcdserver: unhealthy cluster"}}),
    ],
)
def test_a_member_that_cannot_at_this_moment_is_passed_over(
    status: int, body: dict[str, Any], members: Callable[[Any], Member]
) -> None:
    cut_off, well = members(lambda *_: (status, body)), members(lambda *_: (200, {"kvs": []}))
    etcd = Etcd([("127.0.0.1", cut_off.port), ("127.0.0.1", well.port)])
    assert etcd.read("key") == []
    assert etcd.read("key") == []
    assert (len(cut_off.asked), len(well.asked)) == (1, 2)  # it stays with the one that answers
    with pytest.raises(StoreAwayError, match="no etcd answers"):
        Etcd([("127.0.0.1", cut_off.port)]).read("key")


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (429, {"error": "etcdserver: mvcc: database space exceeded", "code": 8}),
        (404, {"message": "etcdserver: requested lease not found", "code": 5}),
        (200, {"error": {"grpc_code": 16, "message": "etcdserver: invalid auth token"}}),
    ],
)
def test_what_stays_refused_is_said_at_once(
    status: int, body: dict[str, Any], members: Callable[[Any], Member]
) -> None:
    full, other = members(lambda *_: (status, body)), members(lambda *_: (200, {}))
    inner = body["error"] if isinstance(body.get("error"), dict) else body
    with pytest.raises(StoreRefusedError, match=inner.get("message") or inner["error"]):
        Etcd([("127.0.0.1", full.port), ("127.0.0.1", other.port)]).read("key")
    assert other.asked == []


# --- to lead ----------------------------------------------------------------------------------


def test_a_claim_whose_answer_was_lost_is_not_somebody_elses(
    server: EtcdServer, members: Callable[[Any], Member]
) -> None:
    """The member writes it and says nothing; the next one finds it there."""
    deaf = members(deaf_after("kv/txn", server.port))
    for claim in ("take", "stand"):
        both = EtcdStore(f"etcd://127.0.0.1:{deaf.port},127.0.0.1:{server.port}/{claim}")
        if claim == "stand":
            assert both.stand("p/0")
            continue
        taken = both.take(ONE)
        assert taken is not None
        both.decide(0, ENTRY, taken[1])
        assert both.entries() == [ENTRY]
        assert both.take(OTHER) is None


def test_a_claim_that_nobody_could_confirm_is_made_again(
    store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for claim in (lambda: store.take(ONE), lambda: store.stand("p/0")):
        loses(store, monkeypatch, "kv/txn")
        with pytest.raises(StoreAwayError):
            claim()
        assert claim()
        assert not claim()  # now it is somebody's
        monkeypatch.undo()


def test_the_lead_is_taken_anew_only_with_the_own_token(
    store: EtcdStore, made: Callable[..., Lead], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host led in between, and etcd is away just when that would be seen."""
    lead = made(store)
    store.let_go(lead._lease)  # it ran out
    other = made(store, OTHER)
    store.decide(0, ENTRY, other.made)
    other.close()
    for lost in ("kv/txn", "kv/range"):
        loses(store, monkeypatch, lost)
        before = (lead._lease, lead.made)
        try:
            assert not lead._again(time.monotonic())
        except StoreAwayError:
            assert (lead._lease, lead.made) == before
            assert not store.keep(lead._lease)
        monkeypatch.undo()
        assert store.leader() is None
    assert not lead._again(time.monotonic())
    assert lead.lost
    assert store.entries() == [ENTRY]


def test_the_lead_counts_from_when_its_key_was_made(
    store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease runs out at once, and another host leads before anything else is asked."""
    etcd, asked = store._etcd, store._etcd._ask
    then = EtcdStore(store.url)

    def ask(path: str, body: Any) -> dict[str, Any]:
        answer = asked(path, body)
        if path == "kv/txn":
            monkeypatch.setattr(etcd, "_ask", asked)
            etcd.delete(store._key("leader"))
            assert then.take(OTHER) is not None
        return answer

    monkeypatch.setattr(etcd, "_ask", ask)
    taken = store.take(ONE)
    assert taken is not None
    with pytest.raises(LostLeadError):
        store.decide(0, ENTRY, taken[1])


# --- decisions --------------------------------------------------------------------------------


def test_a_lease_that_ran_out_is_no_lost_lead_while_nobody_else_leads(
    store: EtcdStore, made: Callable[..., Lead], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that keeps it has not noticed when a decision is refused."""
    lead = made(store)
    journal = EtcdJournal(tmp_path, store, lead, count=0)
    store.let_go(lead._lease)
    assert lead.holds
    refused = list[bool]()

    def was_taken() -> bool:
        refused.append(Lead.was_taken(lead))
        lead._again(time.monotonic())  # as the thread does, a little later
        if len(refused) == 1:
            raise AWAY  # this question was not answered, either
        return refused[-1]

    monkeypatch.setattr(lead, "was_taken", was_taken)
    monkeypatch.setattr(stores, "_AGAIN_S", 0.01)
    journal.write(ENTRY)
    assert store.entries() == [ENTRY]
    assert refused == [False]
    store.let_go(lead._lease)
    made(store, OTHER)
    with pytest.raises(LostLeadError):
        journal.write(ENTRY)
    journal.close()
    assert store.entries() == [ENTRY]


def test_a_leader_that_slept_before_the_fence_leaves_a_newer_one_alone(
    store: EtcdStore, made: Callable[..., Lead], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wrote 5 to the store, and was stopped; another led, and 6 began."""
    lead = made(store)
    journal = EtcdJournal(tmp_path, store, lead, count=0)
    journal.fence(4)
    write = store.write

    def stopped(key: str, value: str, revision: int) -> None:
        write(key, value, revision)
        if key != "generation" or value != "5":
            return
        store.let_go(lead._lease)
        other = EtcdJournal(tmp_path, store, made(store, OTHER), count=0)
        other.fence(6)
        other.close()
        lead._until = 0.0  # as long as it slept
        lead._again(time.monotonic())

    monkeypatch.setattr(store, "write", stopped)
    with pytest.raises(LostLeadError):
        journal.fence(5)
    assert (last_generation(tmp_path), store.generation()) == (6, 6)
    journal.close()


def test_a_fence_is_never_lowered(
    store: EtcdStore, made: Callable[..., Lead], tmp_path: Path
) -> None:
    """Even if a host's clock says that it leads when it does not."""
    journal = EtcdJournal(tmp_path, store, made(store), count=0)
    journal.fence(7)
    journal.fence(5)
    assert last_generation(tmp_path) == 7
    journal.close()


def test_what_waits_for_the_lead_can_be_ended(
    store: EtcdStore, made: Callable[..., Lead], tmp_path: Path
) -> None:
    lead = made(store)
    journal = EtcdJournal(tmp_path, store, lead, count=0)
    lead._until = 0.0  # etcd has been away for longer than a lease lasts

    def turn() -> None:
        raise StoppedError("ended at once, as asked", by=2)

    lead.turn = turn
    with pytest.raises(StoppedError):
        journal.write(ENTRY)
    with pytest.raises(StoppedError):
        lead.wait()
    lead.close()
    lead.turn = lambda: None
    with pytest.raises(LostLeadError):  # nobody waits for what was let go
        lead.wait()
    journal.close()
