"""2,048 simulated agents and a controller: what heartbeats cost, how soon a death is acted on.

    python benchmarks/elastic_scale.py [HOSTS]

The agents are a process that sends sealed statuses over TCP; the controller is the real one. Prints
the controller's processor time per heartbeat, the share of a core at the heartbeat that a job of so
many hosts uses, and the time from a host's word of a death to the first and the last order.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import zmq

from tutti.elastic.controller import Controller, ControllerSettings
from tutti.elastic.events import Phase, Settle, Settled
from tutti.elastic.journal import Journal
from tutti.elastic.membership import Membership
from tutti.elastic.messages import (
    Death,
    Order,
    Report,
    Source,
    Standing,
    Status,
    control_key,
    packed,
    unpacked,
)

KEY = control_key(b"a secret of the benchmark, of some length")
ROUNDS = 5
HEARTBEAT_S_PER_HOST = 0.25 / 512


def settle(question: Settle, members: Membership) -> Settled:
    del members
    return Settled(question.request, question.chips, "plan", Source(kind="begin"))


def status(host: int, number: int, **changes: Any) -> bytes:
    report = {"standing": Standing.IDLE, "process": 1, **changes.pop("report", {})}
    return packed(
        Status(
            job="job", host=f"h/{host}", incarnation=1, number=number,
            reports=(Report(chip=f"h/{host}/0", **report),), **changes,
        ),
        KEY,
    )  # fmt: skip


def agents(address: str, hosts: int, done: Any) -> None:
    """Be all agents: enter what is ordered, send heartbeats, then tell of a death."""
    raise_limits(hosts)
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 2 * hosts)
    sockets = [context.socket(zmq.DEALER) for _ in range(hosts)]
    for socket in sockets:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
    number, order = 1, 0
    for host, socket in enumerate(sockets):
        socket.send(status(host, number))
    for socket in sockets:
        found = unpacked(socket.recv(), KEY)
        assert isinstance(found, Order)
        order = found.number
    running = {"standing": Standing.RUNNING, "generation": 1}
    number += 1
    for host, socket in enumerate(sockets):
        socket.send(status(host, number, order=order, report=running))
    done.put("running")
    for _ in range(ROUNDS):
        done.get()
        number += 1
        for host, socket in enumerate(sockets):
            socket.send(status(host, number, order=order, report=running))
    done.get()
    death = (Death(process=1, how="was killed by SIGKILL", step=7, instruction=3),)
    began = time.perf_counter()
    told = {"standing": Standing.STARTING, "process": 2, "deaths": death}
    sockets[1].send(status(1, number + 1, order=order, report=told))
    sockets[0].recv()
    first = time.perf_counter() - began
    for socket in sockets[1:]:
        socket.recv()
    done.put((first, time.perf_counter() - began))
    context.destroy()


def raise_limits(hosts: int) -> None:
    """Allow as many files as so many connections need."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 8 * hosts + 256), most))


def main(hosts: int) -> None:
    """Measure."""
    raise_limits(hosts)
    context = multiprocessing.get_context("spawn")
    to, fro = context.Queue(), context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder))
        settings = ControllerSettings(job="job", key=KEY, death_after_s=60.0)
        controller = Controller(
            settings, journal, first_all(hosts), lambda *_: "h:1", lambda *_: None
        )
        process = context.Process(target=agents, args=(controller.address, hosts, _Ends(to, fro)))
        process.start()
        while controller.members.phase is not Phase.RUNNING:
            controller.turn()
        fro.get()
        costs = []
        for _ in range(ROUNDS):
            to.put("beat")
            time.sleep(1.0)  # they wait in the socket, so that nothing but them is measured
            began = time.process_time()
            controller.turn()
            controller.turn()
            costs.append((time.process_time() - began) / hosts)
        cost = statistics.median(costs)
        heartbeat_s = max(0.25, HEARTBEAT_S_PER_HOST * hosts)
        print(f"{hosts} hosts: {cost * 1e6:.1f} µs per heartbeat, one every {heartbeat_s:g} s: "
              f"{100 * cost * hosts / heartbeat_s:.1f} % of a core")  # fmt: skip
        to.put("die")
        while controller.members.phase is not Phase.LEAVING:
            began = time.process_time()
            controller.turn()
        first, last = fro.get()
        spent = time.process_time() - began
        print(f"a death is told; the first order after {first * 1e3:.1f} ms, the last of {hosts} "
              f"after {last * 1e3:.1f} ms; the controller's processor time for it, its sockets' "
              f"thread with it: {spent * 1e3:.1f} ms")  # fmt: skip
        process.join()
        controller.close()
        journal.close()


class _Ends:
    """Both directions of a conversation, as the agents see them."""

    def __init__(self, to: Any, fro: Any) -> None:
        self._to, self._fro = to, fro

    def get(self) -> Any:
        return self._to.get()

    def put(self, value: Any) -> None:
        self._fro.put(value)


def first_all(hosts: int) -> Any:
    """Return who settles, once all hosts are there."""
    from tutti.elastic.events import Unsettled

    def answer(question: Settle, members: Membership) -> Any:
        if len(question.chips) < hosts:
            return Unsettled(question.request, "not all are there")
        return settle(question, members)

    return answer


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2048)
