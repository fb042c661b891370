"""Hosts of an elastic run that die whole: who is named, how soon, and when training goes on.

    python -m benchmarks.elastic_host_deaths [--what agent|namespace] [--times 20]

Three replicas on three hosts of this machine. One after the other an agent is killed by SIGKILL
(its ranks end with it), or the namespace that its processes and memory are in; once the others
train it comes back. Prints how often the right host was named, how long that took, and how long
training did.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import tempfile
import time
from pathlib import Path

from tests.dist.train.test_elastic_hosts import NAMESPACE
from tests.support.elastic_hosts import Hosts
from tutti.elastic.journal import Entry, read_journal
from tutti.errors import InputError

LIMIT_S = 180.0


def journal(hosts: Hosts) -> list[Entry]:
    """Return the decisions so far."""
    try:
        return read_journal(hosts.folder / "run")
    except InputError:
        return []


def runs_with(hosts: Hosts, ranks: int, after: float) -> Entry:
    """Wait until so many ranks run since a time; return that decision."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        found = journal(hosts)
        entered = [e for e in found if e.phase == "entering"]
        last = found[-1] if found else None
        going = last is not None and last.phase == "running" and last.at > after
        if last is not None and going and len(entered[-1].ranks) == ranks:
            return last
        time.sleep(0.05)
    raise SystemExit(f"{ranks} ranks do not run again: {journal(hosts)[-1:]}")


def main() -> None:
    """Kill, and print what became of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--what", choices=("agent", "namespace"), default="agent")
    parser.add_argument("--times", type=int, default=20)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        hosts = Hosts(Path(temporary), 3)
        leader = hosts.leader("run", "alike-3.json", steps=1_000_000,
                              elastic={"min_chips": 2, "replan": "never"})  # fmt: skip
        hosts.before = NAMESPACE if given.what == "namespace" else ()
        agents = {node: hosts.agent(node, "run") for node in (1, 2)}
        right, named, again = 0, [], []
        try:
            runs_with(hosts, 3, 0.0)
            for number in range(given.times):
                node = 1 + number % 2
                time.sleep(1.0)
                at = time.time()
                agents[node].kill()
                agents[node].wait()
                running = runs_with(hosts, 2, at)
                verdict = next(e for e in journal(hosts) if e.at > at and e.phase == "settling")
                right += verdict.why.endswith(f"host box/{node} is silent")
                named.append(verdict.at - at)
                again.append(running.at - at)
                print(f"{verdict.at - at:.2f} s: {verdict.why}", flush=True)
                agents[node] = hosts.agent(node, "run")
                runs_with(hosts, 3, running.at)
        finally:
            if named:
                print(
                    f"{given.what}: {right} of {len(named)} named right after "
                    f"{statistics.median(named):.2f} s (at most {max(named):.2f}); training again "
                    f"after {statistics.median(again):.2f} s (at most {max(again):.2f})"
                )
            leader.send_signal(signal.SIGTERM)
            hosts.close()


if __name__ == "__main__":
    main()
