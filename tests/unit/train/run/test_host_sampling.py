"""Who samples a host, and which hosts it probes."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.lines import uniform
from tutti.comm.places import Place
from tutti.observe.network.neighbours import Neighbour
from tutti.observe.store import SeriesStore
from tutti.plan.job import ScheduleKind
from tutti.plan.plan import RankMap
from tutti.train.run import rings
from tutti.train.run.rings import first_ranks, sample_host

PLAN = uniform(24, 4, ScheduleKind.ONE_F_ONE_B)  # three nodes of eight chips, one stage each


def context(folder: Path, rank: int, said: list[str], *, probes: bool = True) -> Any:
    chip = RankMap(PLAN).place(rank).chip
    return SimpleNamespace(
        rank=rank, plan=PLAN, position=chip, name=f"rank {rank}", warn=said.append,
        notice=said.append,
        config=SimpleNamespace(
            folder=folder, measure=SimpleNamespace(probes=probes),
            data=SimpleNamespace(folders=lambda _: []),
        ),
    )  # fmt: skip


def comm(hosts: list[str]) -> Any:
    places = [
        Place(host=hosts[rank // 8], addresses=(f"10.0.0.{rank // 8 + 1}",), port=5000 + rank)
        for rank in range(24)
    ]
    return SimpleNamespace(topology=SimpleNamespace(places=places))


class Probes:
    """Takes the place of the probes, which need their addresses to be of this host."""

    made: list[tuple[tuple[str, ...], int, list[Neighbour]]]

    def __init__(self, own: Any, port: int, neighbours: list[Neighbour], say: Any) -> None:
        self.made.append((own, port, neighbours))

    def sample(self) -> dict[str, float]:
        return {'tutti_neighbour_loss_ratio{peer="fast/1"}': 0.0}

    def close(self) -> None: ...


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> Any:
    Probes.made = []
    monkeypatch.setattr(rings, "NeighbourProbes", Probes)
    return Probes.made


def test_the_first_rank_of_each_node_samples_it(tmp_path: Path, probed: Any) -> None:
    assert first_ranks(PLAN) == {("fast", 0): 0, ("fast", 1): 8, ("fast", 2): 16}
    said: list[str] = []
    with ExitStack() as stack:
        for rank in (1, 7, 15):
            sample_host(context(tmp_path, rank, said), comm(["a", "b", "c"]), stack)
        assert not (tmp_path / "series").exists()
        sample_host(context(tmp_path, 8, said), comm(["a", "b", "c"]), stack)
    store = SeriesStore(tmp_path / "series" / "fast-1.sqlite", read_only=True)
    names = store.names()
    store.close_reading()
    assert any(name.startswith("tutti_neighbour_loss_ratio") for name in names)
    assert said == []  # what is missing is said by the first rank of all
    ((own, port, neighbours),) = probed
    assert (own, port) == (("10.0.0.2",), 5008)
    assert neighbours == [
        Neighbour("fast/0", ("10.0.0.1",), 5000), Neighbour("fast/2", ("10.0.0.3",), 5016),
    ]  # fmt: skip


def test_nodes_of_one_host_and_other_addresses_are_not_probed(tmp_path: Path, probed: Any) -> None:
    said: list[str] = []
    with ExitStack() as stack:
        sample_host(context(tmp_path, 0, said), comm(["a", "a", "a"]), stack)
        sample_host(context(tmp_path, 0, said, probes=False), comm(["a", "b", "c"]), stack)
        other = comm(["a", "b", "c"])
        places = [replace(place, addresses=("fd00::1",)) for place in other.topology.places]
        other.topology.places = places
        sample_host(context(tmp_path, 0, said), other, stack)
    assert probed == []
    assert {text.partition(":")[0] for text in said} <= {"not sampled here"}
    assert len(said) == 3  # once a run


def test_a_taken_port_is_said_and_the_host_is_sampled(tmp_path: Path) -> None:
    said: list[str] = []
    with ExitStack() as stack:  # 10.0.0.2 is no address of this host
        sample_host(context(tmp_path, 8, said), comm(["a", "b", "c"]), stack)
    assert (tmp_path / "series" / "fast-1.sqlite").exists()
    assert len(said) == 1
    assert said[0].startswith("rank 8: neighbours are not probed (10.0.0.2:5008: ")
