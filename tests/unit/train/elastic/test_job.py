"""A host that leads an elastic job with a store: when it takes the folder, and when it lets go."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.elastic_hosts import Hosts, free_port
from tests.support.etcd import EtcdServer
from tutti.elastic import store as stores
from tutti.elastic.etcd import StoreAwayError
from tutti.elastic.join import JOB_FILE, SECRET_IN_RUN
from tutti.elastic.journal import Entry, Journal
from tutti.elastic.store import EtcdStore, Lead, LeadingHost, LostLeadError
from tutti.errors import InputError, StoppedError, TuttiError
from tutti.files import write_text
from tutti.train.elastic import lead_process as leads
from tutti.train.elastic.job import ElasticRun, known_identity
from tutti.train.run.planning import Job, prepare

OTHER = LeadingHost(address="tcp://h:2", node="box/1")
SECRET = "what-the-agents-of-tests-know-00"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with closing(EtcdServer(tmp_path_factory.mktemp("etcd"))) as made:
        made.start()
        yield made


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Hosts:
    return Hosts(tmp_path_factory.mktemp("hosts"), 2)


@pytest.fixture
def job(server: EtcdServer, hosts: Hosts, request: pytest.FixtureRequest) -> Job:
    name = request.node.name
    elastic = {"listen": f"127.0.0.1:{free_port()}", "store": server.url(name), "min_chips": 1}
    return prepare(hosts.config(name, "alike-2.json", elastic=elastic))


@pytest.fixture
def run(job: Job, monkeypatch: pytest.MonkeyPatch) -> ElasticRun:
    monkeypatch.setattr(stores, "LEASE_S", 1)
    made = ElasticRun(job, resume=False, listener=None)
    monkeypatch.setattr(made.agent, "start", lambda: None)
    return made


def live(folder: Path) -> tuple[str, str]:
    """Return what tells the job of a folder from others."""
    return (folder / JOB_FILE).read_text("ascii"), (folder / SECRET_IN_RUN).read_text("ascii")


def test_a_run_that_is_refused_leaves_the_folder_to_the_one_that_leads(job: Job) -> None:
    assert job.config.elastic is not None
    folder, store = job.config.folder, EtcdStore(job.config.elastic.store)
    (folder / JOB_FILE).parent.mkdir(parents=True)
    write_text(folder / JOB_FILE, "first\n")
    write_text(folder / SECRET_IN_RUN, SECRET)
    (folder / SECRET_IN_RUN).chmod(0o600)
    store.begin("first", again=False)
    lead = Lead(store, OTHER)
    with pytest.raises(InputError, match="job first is led by box/1 at this moment"):
        ElasticRun(job, resume=False, listener=None)
    assert live(folder) == ("first\n", SECRET)
    assert known_identity(folder).name == "first"
    lead.close()
    run = ElasticRun(job, resume=False, listener=None)
    assert live(folder) != ("first\n", SECRET)
    assert live(folder) == (f"{run._identity.name}\n", run._identity.secret)
    assert (folder / SECRET_IN_RUN).stat().st_mode & 0o777 == 0o600
    run._leader.close()
    assert run._shared is not None
    run._shared.close()


def test_a_candidate_takes_a_job_as_it_is_and_makes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(leads, "die_with_parent", lambda: None)
    monkeypatch.setattr(Job, "load", lambda _path: None)
    arguments = [str(tmp_path), f"etcd://127.0.0.1:{free_port()}/job", "box/1", "127.0.0.1"]
    assert leads.main(arguments) == 1
    assert f"no elastic run that goes on: it has no {SECRET_IN_RUN}" in (
        capsys.readouterr().err.replace(JOB_FILE, SECRET_IN_RUN)
    )
    assert list(tmp_path.iterdir()) == []
    (tmp_path / JOB_FILE).parent.mkdir(parents=True)
    write_text(tmp_path / JOB_FILE, "first\n")
    with pytest.raises(InputError, match=SECRET_IN_RUN):
        known_identity(tmp_path)
    assert (tmp_path / JOB_FILE).read_text("ascii") == "first\n"


def test_a_run_that_is_resumed_keeps_the_name_and_the_secret_that_agents_wait_for(
    hosts: Hosts,
) -> None:
    elastic = {"listen": f"127.0.0.1:{free_port()}"}  # without a store
    job = prepare(hosts.config("resumed", "alike-2.json", elastic=elastic))
    entry = Entry(at=1.0, generation=1, phase="waiting", why="1 of 2 chips")
    identities = list[tuple[str, str]]()
    for resume, phase in ((False, "waiting"), (True, "given up"), (True, "waiting")):
        run = ElasticRun(job, resume=resume, listener=None)
        identities.append(live(job.config.folder))
        run._leader.close()
        journal = Journal(job.config.folder)
        journal.write(replace(entry, phase=phase))
        journal.close()
    first, second, third = identities
    assert first == second  # it was cut off
    assert third != first  # it had given up: this is another job


def test_whoever_lost_the_lead_lets_go_of_it_before_it_follows(
    run: ElasticRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lead that its thread takes anew would keep all others from leading, and lead nothing."""
    led = list[object]()

    def lost() -> None:
        raise LostLeadError("another host leads the job by now")

    def follow() -> None:
        assert run._shared is not None
        led.append(run._shared.store.leader())
        run.ask_to_stop()  # the controller is closed: nobody is asked for anything

    monkeypatch.setattr(run._leader.controller, "run", lost)
    monkeypatch.setattr(run, "_follow", follow)
    run._leader.controller._identities["box/1"] = b"peer"
    with pytest.raises(StoppedError, match="another host has led the job since"):
        run.run()
    assert led == [None]


def away(*_: Any) -> bool:
    raise StoreAwayError("no etcd answers (as a test says)")


def test_a_run_whose_store_is_away_ends_at_the_second_request(
    run: ElasticRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EtcdStore, "keep", away)

    def ask() -> None:
        assert run._shared is not None
        assert run._shared._lead is not None
        while run._shared._lead.holds:
            time.sleep(0.02)
        run.ask_to_stop(2)
        time.sleep(0.1)
        run.ask_to_stop(2)

    thread = threading.Thread(target=ask)
    thread.start()
    with pytest.raises(StoppedError, match="ended at once, as asked"):
        run.run()
    thread.join()


def test_a_run_whose_store_is_away_and_whose_agent_failed_ends(
    run: ElasticRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EtcdStore, "keep", away)
    run.agent.error = InputError("nothing was heard")
    assert run._shared is not None
    assert run._shared._lead is not None
    run._shared._lead._until = 0.0
    with pytest.raises(TuttiError, match="the agent of this host failed: nothing was heard"):
        run.run()
