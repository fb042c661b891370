"""`elastic:` in a training file: what is refused, in one line each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.elastic_hosts import free_port
from tests.support.train_job import write_job
from tutti.errors import InputError
from tutti.train.elastic.check_elastic import check_elastic
from tutti.train.elastic.copy_price import check_memory, copy_price
from tutti.train.elastic.shared_store import SharedStore
from tutti.train.run.config import TrainConfig, with_changes
from tutti.train.run.planning import Job, prepare


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"))


def job(folder: Path, **changes: Any) -> Job:
    return prepare(with_changes(TrainConfig.load(folder / "train.yaml"), changes))


def test_death_needs_two_heartbeats(folder: Path) -> None:
    with pytest.raises(InputError, match=r"'death_after_s' is 0\.3, but a heartbeat"):
        job(folder, elastic={"death_after_s": 0.3})


def test_more_chips_than_the_cluster_has(folder: Path) -> None:
    with pytest.raises(InputError, match=r"elastic.min_chips is 99, but cluster 'laptop' has \d+"):
        check_elastic(job(folder, elastic={"min_chips": 99}))


def test_figures_that_nobody_would_write(folder: Path) -> None:
    with pytest.raises(InputError, match=r"measure.tensorboard: not written by elastic runs yet"):
        check_elastic(job(folder, elastic={}, **{"measure.tensorboard": True}))


def test_an_unknown_key_and_an_unknown_fault_are_named(folder: Path) -> None:
    with pytest.raises(InputError, match="unknown key 'copy'; did you mean 'copies'"):
        job(folder, elastic={"copy": 1})
    with pytest.raises(InputError, match="kill"):
        job(folder, elastic={"drill": [{"fault": "kil"}]})


def test_partners_need_copies_and_other_hosts(folder: Path) -> None:
    with pytest.raises(InputError, match=r"'partners' is 1, but there are no copies"):
        job(folder, elastic={"partners": 1})
    with pytest.raises(InputError, match=r"elastic.partners is 1, .* on 1 host \(without"):
        check_elastic(job(folder, elastic={"copies": 1, "partners": 1}))
    listening = {"copies": 1, "partners": 1, "listen": "127.0.0.1:29400"}
    with pytest.raises(InputError, match=r"elastic.partners is 1, but the plan's chips are on 1"):
        check_elastic(job(folder, elastic=listening))


def test_copies_that_no_host_has_the_memory_for(folder: Path) -> None:
    price = copy_price(job(folder, elastic={"copies": 2}))
    numbers = sum(p.size for u in range(6) for p in job(folder).spec.parameters(u))
    assert price.copied_bytes == 12 * numbers  # both stages are on one node
    assert price.memory_bytes == 2 * price.copied_bytes
    assert price.place == "fast/0"
    assert "to the host's memory, beside 2 steps of" in price.words(2)
    check_memory(price)
    less = replace(price, host_bytes=price.memory_bytes - 1)
    with pytest.raises(InputError, match=r"host fast/0 would keep .* of copies, but has"):
        check_memory(less)
    slow = replace(price, to_partners_s=price.between_s + 1.0)
    assert slow.pause_s == pytest.approx(1.0 + price.to_host_s)
    assert "to partners" in slow.words(2)


def test_a_store_needs_an_address_and_several_hosts(folder: Path) -> None:
    with pytest.raises(InputError, match=r"elastic.store is 'etcd://a:1'; write etcd://HOST:PORT/"):
        check_elastic(job(folder, elastic={"store": "etcd://a:1", "listen": "127.0.0.1:29400"}))
    with pytest.raises(InputError, match=r"elastic.store is given, but not elastic.listen"):
        check_elastic(job(folder, elastic={"store": "etcd://a:1/job"}))


def test_a_store_that_does_not_answer_is_said_in_one_line() -> None:
    store = SharedStore(f"etcd://127.0.0.1:{free_port()}/job", "p/0", "127.0.0.1:29400")
    with pytest.raises(InputError, match=r"no etcd answers .*; start etcd, or correct the address"):
        store.begin("job", again=False, log=[])
