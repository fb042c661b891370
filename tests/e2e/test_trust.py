"""Strangers at the ports of a running job: they get nothing, they are named, the job goes on."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

torch = pytest.importorskip("torch")

from tests.e2e.test_train_cli import TUTTI, write_job  # noqa: E402
from tests.support.warm_commands import REAL_START  # noqa: E402
from tests.unit.comm.entry.test_listener import Command, is_closed, receive  # noqa: E402
from tutti.comm.entry.store import StoreClient  # noqa: E402
from tutti.comm.entry.trust import REPLY_BYTES, Caller, Key  # noqa: E402
from tutti.launch.secret import Secret  # noqa: E402
from tutti.ranks.local_processes import free_port  # noqa: E402

SILENT = 20
LIMIT_S = 240.0
WRONG = Secret(b"not what the ranks of this job know")


@contextlib.contextmanager
def started(folder: Path, *options: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Start `tutti train` as a user does, its ranks below it; it is over afterwards."""
    known = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "TUTTI_SECRET")}
    known[REAL_START] = "1"  # /proc tells how it began
    process = subprocess.Popen(
        [*TUTTI, "train", "train.yaml", *options], cwd=folder, env={**known, **variables},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def children_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def listening(processes: list[psutil.Process]) -> dict[int, str]:
    """Return the ports that some processes listen on, with the address."""
    found: dict[int, str] = {}
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            for connection in one.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found[connection.laddr.port] = connection.laddr.ip
    return found


def local_names(processes: list[psutil.Process]) -> list[str]:
    """Return the local sockets on which ranks are reached."""
    pids = {str(one.pid) for one in processes}
    lines = Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()
    names = {line.split()[-1] for line in lines if "@tutti-" in line}
    return sorted(name for name in names if name.split("-")[1] in pids)


def ports_of(process: subprocess.Popen[str]) -> tuple[dict[int, str], list[str]]:
    """Wait until both ranks train; return where they are reached."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        ranks = children_of(process)
        ports, names = listening(ranks), local_names(ranks)
        if len(ports) >= 3 and len(names) >= 2:
            return ports, names
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError("the job did not come up")


def secret_of(process: subprocess.Popen[str]) -> Secret:
    """Return what the ranks know; who may look into their memory needs no port."""
    for one in children_of(process):
        with contextlib.suppress(psutil.NoSuchProcess, KeyError):
            return Secret(one.environ()["TUTTI_SECRET"].encode())
    raise AssertionError("no rank")


def at_port(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)


def at_name(name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(LIMIT_S)
    sock.connect(name.replace("@", "\0", 1))
    return sock


def attack(open_one: Any, trap: Path) -> None:
    """Send what strangers send; each time the connection is closed."""
    wrong = Caller(Key(WRONG, "store", "0.0"), 1, 0)
    payloads = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        os.urandom(1 << 16),
        struct.pack("<B3xQQIIIIIQQQQ", 1, *[0] * 7, 2**63, 0, 2**63, 0),  # a huge frame
        struct.pack("<I", 2**32 - 1) + b"{}",
        pickle.dumps(Command(trap)),
        wrong.hello + os.urandom(4096),
    ]
    for payload in payloads:
        sock = open_one()
        with contextlib.suppress(ConnectionError):
            sock.sendall(payload)
        assert is_closed(sock)


def replay(port: int, key: Key, peer: int) -> None:
    """Let a real handshake be done twice, the second time by somebody who only overheard it."""
    caller = Caller(key, 1 - peer, peer)
    with at_port(port) as sock:
        sock.sendall(caller.hello)
        proof = caller.answer(receive(sock, REPLY_BYTES))
    second = at_port(port)
    second.sendall(caller.hello + proof)
    assert is_closed(second)


@pytest.mark.slow
def test_strangers_at_every_port(tmp_path: Path) -> None:
    write_job(tmp_path)
    trap = tmp_path / "a stranger's command ran"
    with started(tmp_path, "--set", "steps=5000", "--json") as process:
        ports, names = ports_of(process)
        assert set(ports.values()) == {"127.0.0.1"}  # and no other network of this machine
        silent = [at_port(port) for port in ports for _ in range(SILENT)]
        for port in ports:
            attack(lambda port=port: at_port(port), trap)
        for name in names:
            attack(lambda name=name: at_name(name), trap)
        secret = secret_of(process)
        meeting = _replayed(secret, ports)
        assert len(meeting) == len(ports)
        metrics = tmp_path / "out" / "metrics.jsonl"
        _wait_for_steps(metrics, _steps(metrics) + 3, process)  # it trains on, among strangers
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 143, err  # its steps are not done
        for sock in silent:
            sock.close()
    assert not trap.exists()
    losses = json.loads(out)["losses"]
    logs = [(tmp_path / "out" / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    for text in logs:
        assert "a stranger at 127.0.0.1:" in text
        assert f"of user {os.getuid()} on this host was turned away from rank" in text
    assert "turned away from the rendezvous at port" in logs[0]
    assert sum(text.count("a stranger at") for text in logs) == 5  # once for each port and name
    with started(tmp_path, "--set", f"steps={len(losses)}", "--json", "-o", "alone") as alone:
        out, err = alone.communicate(timeout=LIMIT_S)
        assert alone.returncode == 0, err
    assert json.loads(out)["losses"] == losses


def _replayed(secret: Secret, ports: dict[int, str]) -> list[int]:
    """Do a real handshake at every port, and its replay."""
    store_key = Key(secret, "store", "0.0")
    done = []
    session = ""
    for port in ports:
        with contextlib.suppress(Exception):
            client = StoreClient(store_key, 1, "127.0.0.1", port, timeout_s=1.0)
            session = client.get("comm/tutti/session").decode()
            client.close()
            replay(port, store_key, 0)
            done.append(port)
    mesh_key = Key(secret, "mesh", session)
    for port in set(ports) - set(done):
        for rank in (0, 1):
            try:
                replay(port, mesh_key, rank)
            except Exception:
                continue  # the other rank's port
            done.append(port)
    return done


def _steps(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0


def _wait_for_steps(path: Path, count: int, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + LIMIT_S
    while _steps(path) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow  # a quarter of a minute of waiting
def test_the_seat_of_a_rank_that_has_not_come(tmp_path: Path) -> None:
    """A stranger comes before rank 1 does; it cannot say a word in its name."""
    write_job(tmp_path)
    port = free_port()
    variables = {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TUTTI_SECRET": "what rank 0 and rank 1 know, and nobody else",
    }  # fmt: skip
    with started(tmp_path, RANK="0", LOCAL_RANK="0", **variables) as first:
        until = time.monotonic() + LIMIT_S
        while port not in listening([psutil.Process(first.pid)]):
            assert first.poll() is None, first.communicate()
            assert time.monotonic() < until
            time.sleep(0.05)
        caller = Caller(Key(WRONG, "store", "0.0"), 1, 0)
        taker = at_port(port)
        taker.sendall(caller.hello)
        nonce = receive(taker, REPLY_BYTES)[:32]
        forged = Key(WRONG, "store", "0.0").proof(b"caller", caller.hello, nonce)
        word = json.dumps({"set": "facts/1", "value": "{}"}).encode()
        with contextlib.suppress(ConnectionError):
            taker.sendall(forged + struct.pack("<I", len(word)) + word)
        assert is_closed(taker)
        trap = tmp_path / "ran"
        attack(lambda: at_port(port), trap)
        with started(tmp_path, RANK="1", LOCAL_RANK="1", **variables) as second:
            said = [one.communicate(timeout=LIMIT_S)[1] for one in (first, second)]
        assert [first.returncode, second.returncode] == [0, 0], said
    assert "wrong proof for rank 1: it knows another secret" in said[0]
    assert not trap.exists()


def test_ranks_of_several_hosts_need_a_secret(tmp_path: Path) -> None:
    write_job(tmp_path)
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "10.255.255.1", "MASTER_PORT": "29999"}
    with started(tmp_path, RANK="1", LOCAL_RANK="1", **variables) as process:
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2
    assert "the job has 2 ranks and no secret" in err
    assert len(err.splitlines()) == 1
