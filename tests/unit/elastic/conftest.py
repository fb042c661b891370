"""An etcd for the tests of a file, and each test's own store in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.support.etcd import EtcdServer
from tutti.elastic.store import EtcdStore


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with closing(EtcdServer(tmp_path_factory.mktemp("etcd"))) as made:
        made.start()
        yield made


@pytest.fixture
def store(server: EtcdServer, request: pytest.FixtureRequest) -> EtcdStore:
    return EtcdStore(server.url(request.node.name.replace("/", "-")))
