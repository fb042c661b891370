"""`tutti agent`: a host that takes part in a job whose controller is elsewhere."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec
import zmq

from tutti.elastic.agent import Agent
from tutti.elastic.agent_settings import IN_MEMORY, AgentSettings
from tutti.elastic.etcd import StoreAwayError
from tutti.elastic.etcd_follower import Candidate, Follower
from tutti.elastic.journal import FOLDER
from tutti.elastic.messages import (
    Hello,
    Refusal,
    SealError,
    Welcome,
    control_key,
    packed,
    unpacked,
)
from tutti.elastic.rank_processes import is_alive
from tutti.elastic.store import SCHEME, EtcdStore
from tutti.errors import InputError
from tutti.launch.secret import SECRET, SECRET_FILE, Secret, find_secret
from tutti.observe.folder import PLAN_FILE
from tutti.plan.check import embedded_cluster
from tutti.plan.files import load_plan, plan_hash
from tutti.ranks.local_capacity import require_node_here

RANK_MODULE = "tutti.train.elastic.rank"
SECRET_IN_RUN = f"{FOLDER}/secret"
JOB_FILE = f"{FOLDER}/job"
_SHARED_MEMORY = Path("/dev/shm")
_OWNER = "owner"  # the file with the process id of the agent that a folder belongs to
_AGAIN_S = 0.5
_FIRST_WORD_S = 10.0  # until it is said that nobody answers
Say = Callable[[str], None]


def address_of(text: str, what: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT"."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"{what} is '{text}'; write HOST:PORT, such as 10.0.0.1:29400")
    return host.strip("[]"), int(port)


def zmq_address(host: str, port: int | str) -> str:
    """Return an address as zmq writes it."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def own_address(host: str) -> str:
    """Return the number by which a name of this host can be listened at."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host))
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise InputError(
            f"elastic.listen: '{host}' is not known here ({error.strerror or error}); give an "
            "address of this host"
        ) from None


def run_agent(
    controller: str, node: str, *, folder: Path | None, say: Say, wait_s: float = 600.0
) -> str:
    """Take part in a job until it ends, or until this host is drained; return why it ended.

    `folder` is where the run's folder is seen from here, if elsewhere than by the controller.
    """
    if not re.fullmatch(r"[^/\s]+/\d+", node):
        raise InputError(f"--node is '{node}'; write POOL/NUMBER, such as a100/1")
    store = EtcdStore(controller) if controller.startswith(SCHEME) else None
    if store is None:
        address = zmq_address(*address_of(controller, "--join"))
        welcome, secret = _welcomed(address, node, folder, say, wait_s)
    else:
        address, welcome, secret = _welcomed_by_leader(store, node, folder, say, wait_s)
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    key = control_key(secret.reveal())
    run = (folder or Path(welcome.folder)).resolve()
    if not run.is_dir():
        raise InputError(
            f"{run}: the run's folder is not on this host; runs on several hosts need a file "
            "system that all of them share (--run says where it is here)"
        )
    name = known_job(run)
    if name != welcome.job:
        raise InputError(
            f"{run}: is the folder of job {name or '(none)'}, and {address} leads job "
            f"{welcome.job} (there: {welcome.folder}); correct --run"
        )
    _require_planned(run, node, welcome, address)
    memory = memory_folder(welcome.job, node)
    environment = chip_environment(
        welcome.chips, world=welcome.world, master=host, secret=secret.reveal().decode()
    )
    settings = AgentSettings(
        job=welcome.job,
        host=node,
        chips=welcome.chips,
        controller=address,
        module=RANK_MODULE,
        folder=run,
        memory=memory,
        environment=environment,
        key=key,
        heartbeat_s=welcome.heartbeat_s,
        wait_s=welcome.wait_s,
        partners=welcome.partners,
        incarnation=welcome.incarnation,
    )
    say(f"joined job {welcome.job} with {', '.join(welcome.chips)}")
    agent = Agent(settings)
    follower = None
    if store is not None:
        own = Candidate(
            node=node, folder=run, address=_address_towards(host),
            environment={**os.environ, SECRET: secret.reveal().decode()},
        )  # fmt: skip
        follower = Follower(store, own, agent.follow)
    return _served(agent, memory, say, follower)


def _require_planned(run: Path, node: str, welcome: Welcome, address: str) -> None:
    """Raise where this host sees another plan than who leads, or is not the planned node."""
    plan = load_plan(run / PLAN_FILE)
    if plan_hash(plan) != welcome.plan_hash:
        raise InputError(
            f"{run / PLAN_FILE}: is another plan (hash {plan_hash(plan)}) than that of the job at "
            f"{address} (hash {welcome.plan_hash}; there: {welcome.folder}); --run must name the "
            "same folder, not a copy of it"
        )
    require_node_here(node, embedded_cluster(plan), os.environ)


def known_job(folder: Path) -> str:
    """Return the name of the job whose folder this is; empty: of none."""
    path = folder / JOB_FILE
    return path.read_text(encoding="ascii").strip() if path.is_file() else ""


def _served(agent: Agent, memory: Path, say: Say, follower: Follower | None) -> str:
    """Run an agent to its end; SIGTERM and Ctrl-C drain it, a second one ends it at once."""
    asked = 0

    def ask(number: int) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            say(f"{signal.Signals(number).name}: this host is to be left; waiting for the others")
            agent.drain()
        else:
            agent.close()

    agent.start()
    ended = ""
    try:
        with signals_to(ask):
            while agent.is_running and not ended:
                time.sleep(0.05)
                ended = agent.end or ""
                if follower is not None:
                    follower.look()
    finally:
        agent.close()
        if follower is not None:
            follower.close()
        if ended:  # copies may be needed by an agent that comes after this one
            shutil.rmtree(memory, ignore_errors=True)
    if agent.error is not None:
        raise agent.error
    return ended or "ended at once, as asked"


@contextmanager
def signals_to(ask: Callable[[int], None]) -> Iterator[None]:
    """Let SIGINT and SIGTERM call a function."""
    if threading.current_thread() is not threading.main_thread():  # others get no signals
        yield
        return

    def called(number: int, frame: FrameType | None) -> None:
        del frame
        ask(number)

    before = {number: signal.signal(number, called) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _NobodyError(InputError):
    """Nobody answered."""


def _welcomed_by_leader(
    store: EtcdStore, node: str, folder: Path | None, say: Say, wait_s: float
) -> tuple[str, Welcome, Secret]:
    """Ask whoever leads to take part, until somebody answers."""
    began = time.monotonic()
    while True:
        why = f"{store.url}: nobody leads"
        try:
            leader = store.leader()
            if leader is not None:
                rest = min(began + wait_s - time.monotonic(), _FIRST_WORD_S)
                return leader.address, *_welcomed(leader.address, node, folder, say, rest)
        except (_NobodyError, StoreAwayError) as error:
            why = str(error)
        if time.monotonic() > began + wait_s:
            raise InputError(f"{why}; waited for {wait_s:g} s")
        time.sleep(_AGAIN_S)


def _address_towards(host: str) -> str:
    """Return this host's address as another one sees it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])


def _welcomed(
    address: str, node: str, folder: Path | None, say: Say, wait_s: float
) -> tuple[Welcome, Secret]:
    """Ask to take part until somebody answers; the run may be started later than this host."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    began, told = time.monotonic(), False
    welcome: Welcome | None = None
    try:
        while time.monotonic() < began + wait_s:
            secret = agent_secret(folder)
            if secret is None:
                time.sleep(_AGAIN_S)
            else:
                key = control_key(secret.reveal())
                socket.send(packed(Hello(node=node), key))
                if socket.poll(int(_AGAIN_S * 1000)):
                    welcome = _answer(socket.recv(), address, node, key, may_change=bool(folder))
                if welcome is not None:
                    return welcome, secret
            if not told and time.monotonic() > began + _FIRST_WORD_S:
                told = True
                say(f"nobody answers at {address} yet; is `tutti train` running there?")
        raise _NobodyError(
            f"nobody answered at {address} for {wait_s:g} s"
            + (f"; {folder}: no elastic run that goes on" if secret is None else "")
        )
    finally:
        socket.close()
        context.term()


def _answer(
    data: bytes, address: str, node: str, key: bytes, *, may_change: bool
) -> Welcome | None:
    try:
        message = unpacked(data, key)
    except (SealError, msgspec.DecodeError):
        if may_change:  # of an earlier run in the same folder
            time.sleep(_AGAIN_S)
            return None
        raise InputError(
            f"the job at {address} has another secret; set {SECRET_FILE} (or {SECRET}) to that of "
            "the job, or name its folder by --run"
        ) from None
    if isinstance(message, Refusal):
        raise InputError(f"the job at {address} refuses node {node}: {message.why}")
    return message if isinstance(message, Welcome) else None


def agent_secret(folder: Path | None) -> Secret | None:
    """Return the job's secret: from the environment, or the run's folder; None: not there yet."""
    environ = dict(os.environ)
    given = environ.get(SECRET) or environ.get(SECRET_FILE)
    if not given and folder is None:
        raise InputError(
            f"no secret is known here: set {SECRET_FILE} (or {SECRET}) to that of the job, or name "
            "its folder by --run"
        )
    if not given and folder is not None:
        path = folder / SECRET_IN_RUN
        if not path.is_file():
            return None
        environ[SECRET_FILE] = str(path)
    return find_secret(environ, 2)


# --- what an agent gives its ranks -------------------------------------------------------------


def chip_environment(
    chips: Sequence[str], *, world: int, master: str, secret: str
) -> dict[str, dict[str, str]]:
    """Return the variables of each chip's processes."""
    threads = str(max(1, (os.cpu_count() or 1) // len(chips)))
    common = {
        "LOCAL_WORLD_SIZE": str(len(chips)), "WORLD_SIZE": str(world),
        "MASTER_ADDR": master, SECRET: secret,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
    }  # fmt: skip
    return {chip: {**common, "LOCAL_RANK": str(index)} for index, chip in enumerate(chips)}


def memory_folder(job: str, host: str) -> Path:
    """Return a folder in this host's memory, which an agent of the same job finds again.

    Folders whose agents ended without removing them, and were of other jobs, go.
    """
    at = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    _clear_old(at, job)
    folder = at / f"{IN_MEMORY}{job}-{host.replace('/', '-')}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise InputError(f"{folder} belongs to somebody else; remove it")
    (folder / _OWNER).write_text(f"{os.getpid()}\n", encoding="ascii")
    return folder


def _clear_old(at: Path, job: str) -> None:
    for folder in at.glob(f"{IN_MEMORY}*"):
        with contextlib.suppress(OSError, ValueError):
            if folder.name.startswith(f"{IN_MEMORY}{job}-") or folder.stat().st_uid != os.getuid():
                continue
            old = time.time() - (folder / _OWNER).stat().st_mtime > _KEPT_S
            if old and not is_alive(int((folder / _OWNER).read_text(encoding="ascii"))):
                shutil.rmtree(folder, ignore_errors=True)


_KEPT_S = 3600.0  # for an agent that is started again


def with_given(
    environment: Mapping[str, Mapping[str, str]], given: Mapping[str, Mapping[str, str]]
) -> dict[str, dict[str, str]]:
    """Return the variables of each chip with those that were given for some."""
    return {chip: {**own, **given.get(chip, {})} for chip, own in environment.items()}
