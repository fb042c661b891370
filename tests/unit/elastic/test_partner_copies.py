"""Copies that go to partners: who they are, what arrives, and what does not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tutti.elastic import partner_copies
from tutti.elastic.messages import Order, Seat
from tutti.elastic.partner_copies import (
    ARRIVED,
    PART_BYTES,
    PartnerCopies,
    kept_copies,
    partners_of,
)

KEY = b"a key of the job"
HOSTS = ("a.1/0", "a.1/1")


def test_partners_are_far_apart_and_never_oneself() -> None:
    hosts = [f"a/{n}" for n in range(4)] + [f"b/{n}" for n in range(4)]
    for host in hosts:
        (first,) = partners_of(host, hosts, 1)
        assert first[0] != host[0]  # of the other pool
        assert len({host, *partners_of(host, hosts, 3)}) == 4
    assert partners_of("a/0", ["a/0"], 2) == ()
    assert partners_of("a/0", ["a/0", "a/1"], 5) == ("a/1",)


@pytest.fixture
def by_host(tmp_path: Path) -> Iterator[dict[str, PartnerCopies]]:
    made = {}
    for host in HOSTS:
        memory = folder(tmp_path, host)
        memory.mkdir()
        made[host] = PartnerCopies(
            job="job", host=host, key=KEY, memory=memory, near="tcp://127.0.0.1:1", partners=1,
            changed=lambda _kept: None,
        )  # fmt: skip
    yield made
    for one in made.values():
        one.close()


def folder(tmp_path: Path, host: str) -> Path:
    return tmp_path / host.replace("/", "-")


def entering(by_host: dict[str, PartnerCopies], generation: int = 1) -> Order:
    seats = tuple(
        Seat(rank=rank, chip=f"{host}/0", host=host, process=1) for rank, host in enumerate(HOSTS)
    )
    addresses = tuple((host, one.address) for host, one in by_host.items())
    return Order(
        job="job",
        number=1,
        generation=generation,
        kind="enter",
        seats=seats,
        copy_addresses=addresses,
    )


def write_copy(memory: Path, chip: str, step: int, data: bytes, generation: int = 1) -> Path:
    path = memory / f"copy-{chip.replace('/', '-')}-{step % 3}"
    path.write_bytes(data)
    label = path.with_name(f"{path.name}.json")
    words = {"chip": chip, "generation": generation, "facts": {"progress": {"step": step}}}
    label.write_text(json.dumps(words), encoding="utf-8")
    return label


def until(what: Callable[[], object]) -> None:
    limit = time.monotonic() + 20
    while not what():
        assert time.monotonic() < limit
        time.sleep(0.005)


def test_a_copy_arrives_whole_and_is_marked(
    by_host: dict[str, PartnerCopies], tmp_path: Path
) -> None:
    here, there = (folder(tmp_path, host) for host in HOSTS)
    data = bytes(range(256)) * (PART_BYTES // 256) + b"the end"
    label = write_copy(here, "a.1/0/0", 7, data)
    for one in by_host.values():
        one.follow(entering(by_host))
    until(label.with_suffix(ARRIVED).is_file)
    assert label.with_suffix(ARRIVED).read_text() == "1 7\n"
    assert kept_copies(there) == (("a.1/0/0", 1, 7),)
    assert (there / "partner-a.1-0-0-1").read_bytes() == data
    write_copy(here, "a.1/0/0", 10, b"shorter")  # over it
    until(lambda: kept_copies(there) == (("a.1/0/0", 1, 10),))
    assert (there / "partner-a.1-0-0-1").read_bytes() == b"shorter"


def test_copies_of_another_generation_stay_where_they_are(
    by_host: dict[str, PartnerCopies], tmp_path: Path
) -> None:
    here, there = (folder(tmp_path, host) for host in HOSTS)
    write_copy(here, "a.1/0/0", 7, b"old", generation=1)
    label = write_copy(here, "a.1/0/0", 8, b"new", generation=2)
    for one in by_host.values():
        one.follow(entering(by_host, generation=2))
    until(label.with_suffix(ARRIVED).is_file)
    assert kept_copies(there) == (("a.1/0/0", 2, 8),)


def test_a_copy_that_is_written_over_meanwhile_gets_no_label(
    by_host: dict[str, PartnerCopies], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = (folder(tmp_path, host) for host in HOSTS)
    label = write_copy(here, "a.1/0/0", 7, b"x" * (2 * PART_BYTES))
    real, sent = PartnerCopies._send, list[int]()

    def send(self: PartnerCopies, *words: object) -> bool:
        label.unlink(missing_ok=True)  # as a rank does before it writes
        sent.append(1)
        return real(self, *words)  # type: ignore[arg-type]

    monkeypatch.setattr(PartnerCopies, "_send", send)
    for one in by_host.values():
        one.follow(entering(by_host))
    until(lambda: sent)
    until((there / "partner-a.1-0-0-1").is_file)
    assert kept_copies(there) == ()
    assert not label.with_suffix(ARRIVED).exists()


def test_a_stranger_brings_nothing(
    by_host: dict[str, PartnerCopies], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = (folder(tmp_path, host) for host in HOSTS)
    label = write_copy(here, "a.1/0/0", 7, b"x")
    by_host["a.1/1"]._key = b"another"
    real, answers = PartnerCopies._heard, list[bool]()

    def heard(self: PartnerCopies, *words: object) -> bool:
        answers.append(real(self, *words))  # type: ignore[arg-type]
        return answers[-1]

    monkeypatch.setattr(PartnerCopies, "_heard", heard)
    monkeypatch.setattr(partner_copies, "_ANSWER_S", 0.2)
    for one in by_host.values():
        one.follow(entering(by_host))
    until(lambda: answers)
    assert not any(answers)
    assert not label.with_suffix(ARRIVED).exists()
    assert kept_copies(there) == ()
