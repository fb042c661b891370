"""Three hosts, each a network namespace, and a store in etcd on a fourth: any of them leads."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.elastic_hosts import Hosts
from tests.support.etcd import EtcdServer
from tests.support.warm_commands import started_by
from tutti.bench.beds.namespaces import visiting, why_not
from tutti.bench.emulated_network import Bed, BedSpec, address
from tutti.elastic.etcd_follower import LEAD_MODULE
from tutti.elastic.journal import Entry, read_journal
from tutti.errors import InputError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
PORT = 29400
SAME = 1e-6


class Job:
    """The hosts of a run, their store and what the run's folder says."""

    def __init__(self, folder: Path, bed: Bed) -> None:
        self.bed, self.hosts = bed, Hosts(folder, 3, port=PORT)
        with self.visit(3):
            self.store = EtcdServer(folder, host=address(3, 0), port=2379)
            self.store.start()
        self.hosts.join = self.store.url("job")

    def visit(self, host: int) -> Any:
        return visiting(self.bed.holders[1 + host])

    def lead(self, *options: str, **elastic: Any) -> subprocess.Popen[bytes]:
        """Start `tutti train` on the first host."""
        given = {
            "listen": f"{address(0, 0)}:{PORT}", "store": self.hosts.join, "min_chips": 2,
            "replan": "never", **elastic,
        }  # fmt: skip
        with self.visit(0):
            return self.hosts.leader("run", "alike-3.json", *options, steps=5000, elastic=given)

    def agent(self, host: int) -> subprocess.Popen[bytes]:
        with self.visit(host):
            return self.hosts.agent(host, "run")

    def journal(self) -> list[Entry]:
        try:
            return read_journal(self.hosts.folder / "run")
        except InputError:
            return []

    def entered(self) -> list[Entry]:
        return [entry for entry in self.journal() if entry.phase == "entering"]

    def losses(self) -> list[float]:
        path = self.hosts.folder / "run" / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        return [float(json.loads(line)["loss"]) for line in lines if line.endswith("}")]

    def until(self, what: Callable[[], Any], limit_s: float = 150.0) -> None:
        end = time.monotonic() + limit_s
        while not what():
            assert time.monotonic() < end, self.words()
            time.sleep(0.05)

    def more_steps(self, count: int) -> None:
        before = len(self.losses())
        self.until(lambda: len(self.losses()) >= before + count)

    def runs_with(self, ranks: int, generations: int) -> None:
        """Wait until so many ranks run in the so-manieth generation."""

        def there() -> bool:
            found = self.entered()
            going = bool(found) and self.journal()[-1].phase == "running"
            return going and len(found) >= generations and len(found[-1].ranks) == ranks

        self.until(there)

    def leading(self) -> psutil.Process | None:
        """Return the process that leads since the first leader was lost."""
        for agent in self.hosts.agents:
            if agent.poll() is None:
                for pid in started_by(agent.pid):
                    if LEAD_MODULE in (child := psutil.Process(pid)).cmdline():
                        return child
        return None

    def words(self) -> str:
        """Return what all have said, for whoever looks at a failure."""
        paths = [*self.hosts.folder.glob("*.log"), *(self.hosts.folder / "run/logs").glob("l*.log")]
        return "\n".join(f"{p.name}:\n{p.read_text(encoding='utf-8')}" for p in paths)

    def require_losses(self) -> None:
        """Compare with what the same plans make, one after the other, without a fault."""
        losses = self.losses()
        plain = self.hosts.train("plain", "alike-3.json", steps=len(losses))
        again = self.hosts.replayed("run", len(losses))
        for name, others in (("undisturbed", plain.losses), ("the same plans", again)):
            apart = [abs(a / b - 1) for a, b in zip(losses, others, strict=True)]
            print(
                f"{len(losses)} losses, to {name} at most {max(apart):.1e}; first {apart[:3]}; "
                f"above 1e-6 from step {next((n for n, x in enumerate(apart, 1) if x > 1e-6), 0)}"
            )
        assert losses == pytest.approx(again, rel=SAME)

    def close(self) -> None:
        self.hosts.close()
        self.store.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    bed = Bed(BedSpec(name="hosts", nics=((1000.0,),) * 4))
    made = Job(tmp_path, bed)
    yield made
    made.close()
    bed.close()


def test_a_leader_is_killed_another_host_leads_and_it_comes_back(job: Job) -> None:
    """Then the second is stopped, a third one leads, and what the stopped one does is void."""
    first = job.lead()
    agents = [job.agent(1), job.agent(2)]
    job.runs_with(3, 1)
    job.more_steps(3)
    killed_at = time.time()
    first.kill()
    job.runs_with(2, 2)
    running = job.journal()[-1]
    print(f"leader killed: another leads and trains {running.at - killed_at:.1f} s later")
    assert any(e.phase == "settling" and e.why == "rank 0 (box/0/0): host box/0 is silent"
               for e in job.journal()), job.words()  # fmt: skip
    assert job.entered()[-1].source == "memory"
    job.more_steps(3)
    agents.append(job.agent(0))
    job.runs_with(3, 3)
    job.more_steps(3)
    second = job.leading()
    assert second is not None
    second.send_signal(signal.SIGSTOP)
    before = [e for e in job.journal() if e.phase == "leads"]
    job.until(lambda: [e for e in job.journal() if e.phase == "leads"] != before)
    second.send_signal(signal.SIGCONT)
    second.wait(20)  # it hears that another leads, and ends
    job.runs_with(3, 4)
    job.more_steps(3)
    third = job.leading()
    assert third is not None
    assert third.pid != second.pid
    third.send_signal(signal.SIGTERM)
    for agent in agents:
        assert agent.wait(60) == 0, job.words()
    text = (job.hosts.folder / "run" / "metrics.jsonl").read_text("utf-8")
    steps = [json.loads(line)["step"] for line in text.splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    job.require_losses()
    generations = [entry.generation for entry in job.entered()]
    assert generations == sorted(set(generations))


def test_the_store_dies_the_ranks_train_on_and_it_comes_back(job: Job) -> None:
    first = job.lead()
    agents = [job.agent(1), job.agent(2)]
    job.runs_with(3, 1)
    job.store.close()
    time.sleep(4.0)  # longer than the lease
    before = len(job.journal())
    with job.visit(3):
        job.store.start()
    job.more_steps(5)
    assert len(job.journal()) == before
    agents[0].kill()  # and it decides again
    job.runs_with(2, 2)
    job.more_steps(3)
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 143, job.words()
    assert agents[1].wait(20) == 0
    job.require_losses()


def test_a_wire_is_cut_and_mended(job: Job) -> None:
    """The host is left as silent, and its processes, which know nothing of it, come back."""
    first = job.lead()
    agents = [job.agent(1), job.agent(2)]
    job.runs_with(3, 1)
    job.more_steps(3)
    wire = ["ip", "link", "set", "port2.0"]  # of the switch
    cut_at = time.time()
    job.bed.inside(job.bed.holders[0], [*wire, "nomaster"], [])
    job.runs_with(2, 2)
    settled = next(e for e in job.journal() if e.phase == "settling" and e.at > cut_at)
    assert settled.why == "rank 2 (box/2/0): host box/2 is silent"
    print(f"wire cut: named after {settled.at - cut_at:.2f} s")
    job.more_steps(3)
    job.bed.inside(job.bed.holders[0], [*wire, "master", "rail0"], [])
    job.runs_with(3, 3)
    job.more_steps(3)
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 143, job.words()
    for agent in agents:
        assert agent.wait(30) == 0, job.words()
    job.require_losses()
