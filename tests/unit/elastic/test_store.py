"""The store in etcd: one leads, by lease; whoever lost the lead decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.elastic_hosts import free_port
from tests.support.etcd import EtcdServer
from tutti.elastic import store as stores
from tutti.elastic.etcd import Etcd, StoreAwayError, StoreRefusedError
from tutti.elastic.journal import Entry, read_journal
from tutti.elastic.store import EtcdJournal, EtcdStore, Lead, LeadingHost, LostLeadError, parse_url
from tutti.errors import InputError

ONE, OTHER = (
    LeadingHost(address="tcp://h:1", node="p/0"),
    LeadingHost(address="tcp://h:2", node="p/1"),
)


def entry(generation: int, phase: str = "running") -> Entry:
    return Entry(at=1.0, generation=generation, phase=phase, why="so")


def until(what: Callable[[], object], limit_s: float = 10.0) -> None:
    end = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_decisions_are_in_the_store_and_in_the_log(store: EtcdStore, tmp_path: Path) -> None:
    store.begin("job", again=False)
    lead = Lead(store, ONE)
    journal = EtcdJournal(tmp_path, store, lead, count=0)
    journal.write(entry(1))
    journal.fence(2)
    journal.write(entry(2))
    assert store.entries() == read_journal(tmp_path) == [entry(1), entry(2)]
    assert (store.generation(), store.last(), store.leader()) == (2, entry(2), ONE)
    journal.close()
    lead.close()
    assert store.leader() is None


def test_one_leads_and_the_next_one_only_when_it_is_gone(store: EtcdStore) -> None:
    lead = Lead(store, ONE)
    with pytest.raises(LostLeadError):
        Lead(store, OTHER)
    lead.close()
    other = Lead(store, OTHER)
    assert store.leader() == OTHER
    other.close()


def test_one_that_was_stopped_for_long_decides_nothing(
    store: EtcdStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread does not run for longer than the lease lasts; another host leads meanwhile."""
    monkeypatch.setattr(stores, "LEASE_S", 1)
    lead = Lead(store, ONE)
    journal = EtcdJournal(tmp_path, store, lead, count=0)
    lead._over.set()  # as if stopped: it keeps nothing alive
    lead._thread.join()
    until(lambda: store.leader() is None)
    assert not lead.holds
    other = Lead(store, OTHER)
    lead._over.clear()
    lead._until = float("inf")  # even if its own clock were wrong
    with pytest.raises(LostLeadError):
        journal.write(entry(1))
    with pytest.raises(LostLeadError):
        journal.fence(7)
    journal.close()
    assert store.entries() == []
    assert store.generation() == 0
    assert not lead._again(time.monotonic())  # nor does it get the lead back
    other.close()
    assert not lead._again(time.monotonic())  # even if nobody leads: another decided since
    assert lead.lost


def test_while_the_store_is_away_nothing_is_decided_and_then_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "LEASE_S", 1)
    server = EtcdServer(tmp_path)
    server.start()
    try:
        store = EtcdStore(server.url("job"))
        lead = Lead(store, ONE)
        assert lead.wait() is False
        server.pause()
        until(lambda: not lead.holds)
        with pytest.raises(StoreAwayError):
            store.leader()
        server.go_on()
        assert lead.wait() is True
        assert store.leader() == ONE
        journal = EtcdJournal(tmp_path, store, lead, count=0)
        journal.write(entry(1))
        assert store.entries() == [entry(1)]
        journal.close()
        lead.close()
    finally:
        server.close()


def test_stores_of_another_job_led_or_cut_off_are_refused(store: EtcdStore) -> None:
    store.begin("one", again=False)
    with pytest.raises(InputError, match="is of job one, not of two"):
        store.begin("two", again=True)
    lead = Lead(store, ONE)
    with pytest.raises(InputError, match="job one is led by p/0 at this moment; join it"):
        store.begin("two", again=False)
    for number in range(3):
        store.decide(number, entry(number), lead.made)
    store._etcd.delete(store._key("decisions/00000001"))
    with pytest.raises(InputError, match="decision 1 is missing; its log was cut off"):
        store.entries()
    lead.close()
    store.begin("two", again=False)  # of a job that nobody leads nothing stays
    assert (store.job(), store.entries()) == ("two", [])


def test_only_one_host_stands_at_a_time(store: EtcdStore) -> None:
    assert store.stand("p/0")
    assert not store.stand("p/1")
    store.stand_down()
    assert store.stand("p/1")


def test_a_member_that_is_away_is_passed_over(server: EtcdServer) -> None:
    both = EtcdStore(f"etcd://127.0.0.1:{free_port()},127.0.0.1:{server.port}/two")
    both.begin("job", again=False)
    assert both.job() == "job"


def test_a_store_that_is_not_there_or_refuses_says_so(server: EtcdServer) -> None:
    with pytest.raises(StoreAwayError, match="no etcd answers"):
        EtcdStore(f"etcd://127.0.0.1:{free_port()}/job").job()
    with pytest.raises(StoreRefusedError, match=r"etcd at .*: .*lease not found"):
        Etcd([("127.0.0.1", server.port)]).claim("key", "value", "12345")


@pytest.mark.parametrize("url", ["etcd://h/job", "etcd://h:1", "http://h:1/j", "etcd://h:1/a/b"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(InputError, match="write etcd://HOST:PORT/NAME"):
        parse_url(url)
    assert parse_url("etcd://a:1,[::1]:2/job") == ([("a", 1), ("::1", 2)], "job")
