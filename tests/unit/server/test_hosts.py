"""Hosts of a deployment: who may take part, what is wanted of them, and when they are lost."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

zmq = pytest.importorskip("zmq")
pytest.importorskip("torch")

from tests.support.deployed import pipeline, write_folder, write_plan  # noqa: E402
from tests.support.train_job import tutti  # noqa: E402
from tutti.errors import InputError  # noqa: E402
from tutti.launch.secret import SECRET  # noqa: E402
from tutti.plan.plan import Plan  # noqa: E402
from tutti.ranks.local_processes import free_port  # noqa: E402
from tutti.server.hosts import messages  # noqa: E402
from tutti.server.hosts.agent import Agent, AgentSettings  # noqa: E402
from tutti.server.hosts.facts import facts_of, weights_digest  # noqa: E402
from tutti.server.hosts.front import Hosts  # noqa: E402
from tutti.server.hosts.hosted_group import HostedGroup  # noqa: E402
from tutti.server.hosts.messages import (  # noqa: E402
    CONTROL,
    LOST_S,
    Facts,
    Join,
    RankStatus,
    Refusal,
    Status,
    Wanted,
    Welcome,
)
from tutti.server.hosts.rank_hosts import hosts_of, seats_of  # noqa: E402
from tutti.server.messages import EngineState, HostAddress, ServerFolder  # noqa: E402
from tutti.server.sockets import ServerSockets, SocketName, call_by  # noqa: E402

KEY = b"7" * 64
FACTS = Facts(version="1", plan="p", model="m")
AT = HostAddress("127.0.0.1", 30000)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Plan]:
    folder = write_folder(tmp_path_factory.mktemp("hosts") / "tiny", layers=2)
    path = folder.parent / "plan.json"
    plan = write_plan(
        path,
        folder,
        pipeline(((0, 2), "fast/0/0"), ((2, 4), "slow/0/1"), share=0.5),
        pipeline(((0, 4), "slow/0/3"), share=0.5),
    )
    return folder, path, plan


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Front:
    """A front and, for each host, a socket in an agent's place."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.port = free_port()
        self.hosts = Hosts(
            ("127.0.0.1", self.port), KEY, FACTS, ["fast/0", "slow/0"], {"dtype": "fp32"},
            clock=self.clock,
        )  # fmt: skip
        self.context: Any = zmq.Context()
        self.agents: list[Any] = []

    def agent(self, secret: bytes = KEY) -> Any:
        made = self.context.socket(zmq.DEALER)
        call_by(made, secret, CONTROL)
        made.connect(f"tcp://127.0.0.1:{self.port}")
        self.agents.append(made)
        return made

    def told(self, agent: Any, said: messages.FromHost, kind: type) -> Any:
        """Let an agent say something; return the first answer of a kind."""
        agent.send(messages.encode(said))
        until = time.monotonic() + 20
        self.lines: list[str] = []
        while time.monotonic() < until:
            self.lines += self.hosts.look()
            if agent.poll(10):
                answer = messages.to_host(agent.recv())
                if isinstance(answer, kind):
                    return answer
        raise AssertionError("no answer")

    def joins(self, agent: Any, **changes: Any) -> Any:
        given = {"host": "fast/0", "incarnation": "a", "facts": FACTS, "at": AT, **changes}
        return self.told(agent, Join(**given), Welcome | Refusal)  # type: ignore[arg-type]

    def close(self) -> None:
        self.hosts.close()
        for agent in self.agents:
            agent.close(0)
        self.context.term()


@pytest.fixture
def front() -> Iterator[Front]:
    made = Front()
    yield made
    made.close()


def test_who_may_take_part(front: Front) -> None:
    agent = front.agent()
    for name, remedy in {
        "version": "install the same tutti on all hosts",
        "plan": "give all hosts the same plan file",
        "model": "give all hosts the same model folder",
    }.items():
        answer = front.joins(agent, facts=msgspec.structs.replace(FACTS, **{name: "x"}))
        assert isinstance(answer, Refusal)
        assert not answer.later
        assert f"has {name} x, the front has " in answer.message
        assert answer.message.endswith(remedy)
    answer = front.joins(agent, host="fats/0")
    assert "no engines on 'fats/0'; did you mean 'fast/0'?" in answer.message
    assert front.joins(agent) == Welcome(engine={"dtype": "fp32"})
    assert front.hosts.missing() == ["slow/0"]


def test_another_agent_takes_the_place_of_one_that_is_silent(front: Front) -> None:
    assert isinstance(front.joins(front.agent()), Welcome)
    other = front.agent()
    refused = front.joins(other, incarnation="b")
    assert refused.later
    assert "fast/0 is there already" in refused.message
    front.clock.now += LOST_S / 2
    assert isinstance(front.joins(other, incarnation="b"), Welcome)
    assert front.hosts.incarnation("fast/0") == "b"
    front.clock.now += LOST_S + 1
    assert front.hosts.look() == ["fast/0 was not heard of for 7 s"]
    assert front.hosts.incarnation("fast/0") == ""


def test_a_stranger_is_not_heard(front: Front) -> None:
    stranger = front.agent(b"8" * 64)
    stranger.send(messages.encode(Join(host="fast/0", incarnation="a", facts=FACTS, at=AT)))
    for _ in range(30):
        assert front.hosts.look() == []
        assert not stranger.poll(10)
    assert front.hosts.missing() == ["fast/0", "slow/0"]


def test_what_is_no_message_is_passed_over(front: Front) -> None:
    agent = front.agent()
    agent.send(b"\x00nonsense")
    assert isinstance(front.joins(agent), Welcome)


def test_an_engine_waits_for_its_hosts_and_begins_anew_without_one(
    front: Front, deployed: tuple[Path, Path, Plan], tmp_path: Path
) -> None:
    seats = seats_of(deployed[2])
    assert hosts_of(seats) == ["fast/0", "slow/0"]
    own = [seat for (engine, _), seat in seats.items() if engine == 0]
    group = HostedGroup(0, ServerFolder(tmp_path), front.hosts, own, "engine 0")
    group.start()
    fast, slow = front.agent(), front.agent()
    front.joins(fast)
    assert group.look() is None
    front.joins(slow, host="slow/0")
    assert group.look() == "engine 0 starts on fast/0, slow/0"
    front.hosts.look()
    ready = EngineState(number=0, generation=1, ready=True, address="tcp://x:1")
    ranks = [RankStatus(engine=0, generation=1, rank=0, ready=ready)]
    wanted = front.told(fast, Status(host="fast/0", incarnation="a", ranks=ranks), Wanted)
    while not wanted.engines:  # what was wanted before
        wanted = messages.to_host(fast.recv())
    assert wanted.engines == {0: 1}
    assert wanted.hosts == {"fast/0": AT, "slow/0": AT}
    while (said := group.look()) is None:
        front.hosts.look()
    assert said.startswith("engine 0 is ready")
    assert group.state.ready
    gone = [RankStatus(engine=0, generation=1, rank=1, code=-9)]
    slow.send(messages.encode(Status(host="slow/0", incarnation="a", ranks=gone)))
    while (said := group.look()) is None:
        front.hosts.look()
    assert said == "rank 1 of engine 0 ended on slow/0 (signal 9); starting another"
    assert (group.state.generation, group.state.ready) == (2, False)
    assert group.look() == "engine 0 starts on fast/0, slow/0"
    slow.send(messages.encode(Status(host="slow/0", incarnation="a", leaving=True)))
    while (said := group.look()) is None:
        front.hosts.look()
    assert said == "engine 0 lost slow/0, and waits for it"
    assert group.look() is None


def test_an_engine_that_cannot_be_is_given_up(
    front: Front, deployed: tuple[Path, Path, Plan], tmp_path: Path
) -> None:
    seats = seats_of(deployed[2])
    group = HostedGroup(1, ServerFolder(tmp_path), front.hosts, [seats[1, 0]], "engine 1")
    group.start()
    slow = front.agent()
    front.joins(slow, host="slow/0")
    group.look()
    failed = RankStatus(engine=1, generation=1, rank=0, code=2, failed="no such weights")
    slow.send(messages.encode(Status(host="slow/0", incarnation="a", ranks=[failed])))
    while (said := group.look()) is None:
        front.hosts.look()
    assert said == "engine 1 cannot run on slow/0: no such weights"
    assert group.given_up == said


def test_a_rank_has_five_ports_of_its_host(
    deployed: tuple[Path, Path, Plan], tmp_path: Path
) -> None:
    folder = ServerFolder(tmp_path)
    table = {"fast/0": HostAddress("10.0.0.1", 29600), "slow/0": HostAddress("::2", 29700)}
    folder.write("hosts.json", table)
    sockets = ServerSockets(folder, KEY, seats_of(deployed[2]))
    assert sockets.address(SocketName("engine", 0, 3)) == "tcp://10.0.0.1:29600"
    assert sockets.address(SocketName("keys", 0, 3, 1)) == "tcp://[::2]:29703"
    assert sockets.address(SocketName("follower", 1, 3)) == "tcp://[::2]:29706"


def test_an_earlier_generation_is_a_stranger(
    deployed: tuple[Path, Path, Plan], tmp_path: Path
) -> None:
    folder = ServerFolder(tmp_path)
    folder.write(
        "hosts.json", dict.fromkeys(("fast/0", "slow/0"), HostAddress("127.0.0.1", free_port()))
    )
    sockets = ServerSockets(folder, KEY, seats_of(deployed[2]))
    context: Any = zmq.Context()
    listener, old, new = (context.socket(kind) for kind in (zmq.PULL, zmq.PUSH, zmq.PUSH))
    try:
        sockets.bind(listener, SocketName("engine", 0, 2))
        sockets.connect(old, SocketName("engine", 0, 1))
        sockets.connect(new, SocketName("engine", 0, 2))
        old.setsockopt(zmq.LINGER, 0)
        old.send(b"old")
        new.send(b"new")
        assert listener.recv() == b"new"
        assert not listener.poll(300)
    finally:
        for one in (listener, old, new):
            one.close(0)
        context.term()


def test_an_agent_forgets_an_earlier_front(deployed: tuple[Path, Path, Plan]) -> None:
    """Both count generations from 1: an engine of the first is not one of the second."""
    folder, _, plan = deployed
    settings = AgentSettings(
        front=("127.0.0.1", free_port()), host="fast/0", folder=folder, plan=plan, ports=30000
    )
    told: list[str] = []
    agent = Agent(settings, KEY, told.append, "127.0.0.1")
    try:
        agent.folder.write(agent.folder.ready(0, 1).name, EngineState(ready=True))
        agent._welcomed(Welcome(engine={"dtype": "fp32"}))
        assert not agent.folder.ready(0, 1).exists()
        assert agent.folder.config().engine == {"dtype": "fp32"}
        assert agent.folder.config().spread
        assert not agent.ready()
    finally:
        agent._leave()
    assert told == ["fast/0 takes part, at 127.0.0.1"]


def test_weights_are_told_apart(deployed: tuple[Path, Path, Plan], tmp_path: Path) -> None:
    folder, _, plan = deployed
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert facts_of(plan, copy) == facts_of(plan, folder)
    weights = next(copy.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    assert weights_digest(copy) != weights_digest(folder)


def test_bad_input(
    deployed: tuple[Path, Path, Plan],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, path, _ = deployed
    plan = ("--plan", str(path))
    join = ("--join", "127.0.0.1:1")
    cases = {
        ("--listen", "127.0.0.1:29555"): "--listen is for the engines of a plan; give --plan",
        ("--listen", "nowhere", *plan): "--listen is 'nowhere'; write HOST:PORT",
        ("--listen", "127.0.0.1:29555", *plan): "no secret",
        join: "--join needs --plan and --node",
        (*join, *plan, "--node", "fats/0"): "no engines on 'fats/0'; did you mean 'fast/0'?",
        (*join, *plan, "--listen", "127.0.0.1:2"): "--listen and --join are two servers",
    }
    for options, why in cases.items():
        code, _, error = tutti(capsys, "serve", str(folder), *options)
        assert code == 2, error
        assert why in error
    monkeypatch.setenv(SECRET, "7" * 64)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"cannot be awaited at 127.0.0.1:{port} "):
            Hosts(("127.0.0.1", port), KEY, FACTS, [], {})
    code, _, error = tutti(
        capsys, "serve", str(folder), *join, *plan, "--node", "fast/0", "--wait", "0"
    )
    assert code == 1
    assert "nobody answered at 127.0.0.1:1" in error
