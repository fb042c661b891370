"""Elastic runs on several hosts: agents join, die, are drained and come back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.elastic_hosts import Hosts
from tutti.elastic.journal import Entry, read_journal
from tutti.errors import InputError

# processes and memory that end together, as those of a host
NAMESPACE = [
    "unshare", "--pid", "--mount", "--fork", "--kill-child", "sh", "-c",
    'mount -t tmpfs none /dev/shm && mount -t proc none /proc && exec "$@"', "sh",
]  # fmt: skip


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path, 3)
    yield made
    made.close()


def journal(hosts: Hosts, name: str = "run") -> list[Entry]:
    try:
        return read_journal(hosts.folder / name)
    except InputError:
        return []


def entered(hosts: Hosts) -> list[Entry]:
    return [entry for entry in journal(hosts) if entry.phase == "entering"]


def steps(hosts: Hosts) -> int:
    path = hosts.folder / "run" / "metrics.jsonl"
    return len(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else 0


def wait(what: Callable[[], Any], limit_s: float = 90.0) -> None:
    until = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.02)


def some_steps(hosts: Hosts, count: int) -> None:
    """Let some more steps pass."""
    before = steps(hosts)
    wait(lambda: steps(hosts) >= before + count)


def meanwhile(*happenings: Callable[[], Any]) -> threading.Thread:
    """Do things one after the other beside a run."""

    def run() -> None:
        for happening in happenings:
            happening()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_host_that_dies_is_left_and_taken_back(hosts: Hosts) -> None:
    """Three replicas on three hosts; one is killed whole, and comes again.

    Their clocks are an hour apart, and the one that comes again has lost another.
    """
    other, victim = hosts.agent(1, "run", clock_s=3600), hosts.agent(2, "run", clock_s=-3600)
    killed_at = list[float]()

    def kill() -> None:
        killed_at.append(time.time())
        victim.kill()  # its ranks end with it

    beside = meanwhile(
        lambda: wait(lambda: steps(hosts) >= 3),
        kill,
        lambda: wait(lambda: len(entered(hosts)) == 2 and journal(hosts)[-1].phase == "running"),
        lambda: hosts.agent(2, "run", clock_s=-7200),
        lambda: wait(lambda: len(entered(hosts)) == 3 and journal(hosts)[-1].phase == "running"),
        lambda: some_steps(hosts, 4),
        lambda: os.kill(os.getpid(), signal.SIGTERM),
    )
    result = hosts.train(
        "run", "alike-3.json", steps=5000, elastic={"min_chips": 2, "replan": "never"}
    )
    beside.join()
    again = hosts.replayed("run", len(result.losses))
    assert result.losses == pytest.approx(again, rel=1e-6)
    found = entered(hosts)
    assert [len(entry.ranks) for entry in found] == [3, 2, 3]
    assert [entry.source for entry in found] == ["begin", "memory", "memory"]
    settled = next(e for e in journal(hosts) if e.phase == "settling" and e.generation == 1)
    assert settled.why == "rank 2 (box/2/0): host box/2 is silent"
    print(f"silent host: {settled.at - killed_at[0]:.2f} s after it died")
    assert other.wait(20) == 0


@pytest.mark.slow
def test_a_drained_host_gives_its_state_and_goes(hosts: Hosts) -> None:
    """Two stages, no copies, no replicas: what the drained one holds must be handed over."""
    plain = hosts.train("plain", "staged.json", steps=25)
    spare, leaver = hosts.agent(2, "run"), hosts.agent(1, "run")
    beside = meanwhile(
        lambda: wait(lambda: steps(hosts) >= 3),
        lambda: leaver.send_signal(signal.SIGTERM),
        lambda: wait(lambda: leaver.poll() is not None),
    )
    result = hosts.train("run", "staged.json", steps=25, elastic={"replan": "never"})
    beside.join()
    assert leaver.wait(1) == 0
    assert result.losses == plain.losses
    _, second = entered(hosts)
    assert second.ranks == ("box/0/0", "box/2/0")
    assert second.source == "memory"
    assert any("box/1/0 on host box/1 is to be left" in e.why for e in journal(hosts))
    assert spare.wait(20) == 0


@pytest.mark.slow
def test_a_namespace_dies_whole_and_its_partner_has_its_state(hosts: Hosts) -> None:
    """Two stages, no replicas: the memory of the lost host goes with it, its partner's does not."""
    if subprocess.run([*NAMESPACE, "true"], check=False).returncode:
        pytest.skip("this machine makes no namespaces")
    hosts.before = NAMESPACE
    spare, victim = hosts.agent(2, "run"), hosts.agent(1, "run")
    beside = meanwhile(
        lambda: wait(lambda: steps(hosts) >= 6),
        victim.kill,
        lambda: wait(lambda: len(entered(hosts)) == 2 and journal(hosts)[-1].phase == "running"),
        lambda: some_steps(hosts, 4),
        lambda: os.kill(os.getpid(), signal.SIGTERM),
    )
    elastic = {"replan": "never", "copies": 1, "partners": 1}
    result = hosts.train("run", "staged.json", steps=5000, elastic=elastic)
    beside.join()
    plain = hosts.train("plain", "staged.json", steps=len(result.losses))
    assert result.losses == plain.losses
    _, second = entered(hosts)
    assert second.ranks == ("box/0/0", "box/2/0")
    assert second.source == "memory"
    print(second.why)
    assert "partner" in second.why
    assert second.step is not None
    assert second.step >= 3
    assert spare.wait(20) == 0


@pytest.mark.slow
def test_a_lost_controller_comes_back_from_its_log(hosts: Hosts) -> None:
    """The leading host dies whole; started again, it finds the agent and its state waiting."""
    plain = hosts.train("plain", "alike-2.json", steps=30)
    other = hosts.agent(1, "run")
    leader = hosts.leader("run", "alike-2.json", steps=30)
    wait(lambda: steps(hosts) >= 4)
    leader.kill()
    leader.wait()
    before = journal(hosts)[-1].generation
    again = hosts.leader("run", "alike-2.json", "--resume", steps=30)
    assert again.wait(120) == 0, (hosts.folder / "leader.log").read_text(encoding="utf-8")
    assert other.wait(20) == 0
    second = entered(hosts)[-1]
    assert (second.generation, second.source) == (before + 1, "memory")
    assert second.step is not None
    assert second.step >= 4
    losses = [
        float(json.loads(line)["loss"])
        for line in (hosts.folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    ]
    assert losses == pytest.approx(plain.losses, rel=1e-4)
