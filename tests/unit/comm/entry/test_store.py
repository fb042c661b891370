"""The store of a job: words for ranks, and for nobody else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest

pytest.importorskip("torch")

from tutti.comm.entry import store as module
from tutti.comm.entry.find_store import open_store
from tutti.comm.entry.store import PrefixedStore, StoreClient, StoreError, StoreServer
from tutti.comm.entry.trust import Key
from tutti.launch.secret import Secret

KEY = Key(Secret(b"s" * 32), "store")
OTHER = Key(Secret(b"t" * 32), "store")


@pytest.fixture
def server() -> Iterator[StoreServer]:
    found = StoreServer(KEY, 3, "127.0.0.1")
    yield found
    found.close()


def client(server: StoreServer, rank: int = 0, key: Key = KEY) -> StoreClient:
    return StoreClient(key, rank, "127.0.0.1", server.port, timeout_s=20.0)


def test_words_are_kept_and_waited_for(server: StoreServer) -> None:
    first, second = client(server), client(server, 1)
    first.set("a", "ä\n" * 100_000)
    assert second.get("a").decode() == "ä\n" * 100_000
    assert second.check(["a"])
    assert not second.check(["a", "b"])
    late = threading.Timer(0.2, lambda: first.set("b", "late"))
    late.start()
    second.wait(["a", "b"], timedelta(seconds=20))
    assert second.get_all(["b", "a"], 1.0)[0] == "late"
    part = PrefixedStore("x", first)
    part.set("c", "1")
    assert part.get("c") == second.get("x/c") == b"1"
    assert part.check(["c"])
    part.wait(["c"], timedelta(seconds=1))
    first.close(), second.close()


def test_words_that_do_not_come(server: StoreServer) -> None:
    one = client(server)
    with pytest.raises(StoreError, match=r"after 0\.1 s nobody has said a, b at 127\.0\.0\.1"):
        one.get_all(["a", "b"], 0.1)
    one.set("a", "1")  # and the connection is as good as before
    assert one.get("a") == b"1"
    one.close()


def test_a_store_that_ends(server: StoreServer) -> None:
    one = client(server)
    server.close()
    with pytest.raises(StoreError, match=r"is gone .*; look at rank 0's log"):
        one.set("a", "1")
    one.close()


def test_another_secret_neither_reads_nor_writes(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_DOUBT_S", 0.3)
    with pytest.raises(StoreError, match="does not know this job's secret"):
        client(server, 1, OTHER)
    one = client(server)
    assert server._words == {}
    one.close()


def test_somebody_else_at_the_port_is_not_believed() -> None:
    """Whoever takes the port before rank 0 does gets no word of a rank."""
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        heard: list[bytes] = []

        def answer() -> None:
            while True:
                try:
                    sock, _ = squatter.accept()
                except OSError:
                    return
                heard.append(sock.recv(4096))
                sock.sendall(bytes(64))
                sock.close()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(StoreError, match="does not know this job's secret"):
            StoreClient(KEY, 1, "127.0.0.1", squatter.getsockname()[1], timeout_s=0.5)
        squatter.shutdown(socket.SHUT_RDWR)
    assert {len(found) for found in heard} == {48}  # a greeting, and nothing more


class Board:
    """torchrun's store, where anybody writes."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        del timeout
        if not all(key in self.values for key in keys):
            raise RuntimeError("wait timeout")


def test_torchruns_store_holds_a_sealed_port() -> None:
    board, secret, said = Board(), Secret(b"s" * 32), list[str]()
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    keeper = open_store(secret, 20.0, environ={**variables, "RANK": "0"}, board=board)
    keeper.set("word", "x")
    ((name, sealed),) = board.values.items()
    board.values[name] = b"4444 and a wrong seal"
    mend = threading.Timer(0.3, lambda: board.values.update({name: sealed}))
    mend.start()
    other = open_store(
        secret, 20.0, environ={**variables, "RANK": "1"}, board=board, stranger=said.append
    )
    assert other.get("word") == b"x"
    assert "was not written by a rank of this job; it sent b'4444 and a wrong seal'" in said[0]
    again = {**variables, "RANK": "1", "TUTTI_ATTEMPT": "1"}  # another start of the job
    with pytest.raises(StoreError, match="has not said where the ranks meet"):
        open_store(secret, 0.1, environ=again, board=board)
    keeper.close(), other.close()
