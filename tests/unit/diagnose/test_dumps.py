"""Dumps of flight recorders: read without executing them, and the rank that the others wait for."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from tutti.diagnose.dumps.folder import diagnose_dump_folder
from tutti.diagnose.dumps.records import read_dumps
from tutti.diagnose.dumps.values import plain_values
from tutti.diagnose.dumps.verdict import diagnose_dumps
from tutti.diagnose.finding import Component, Finding
from tutti.errors import InputError
from tutti.observe import ring as ring_file
from tutti.observe.folder import RINGS
from tutti.observe.ring import Kind, Listed, Ring, read_ring, ring_path

WORLD = range(4)


def entry(group: str, number: int, operation: str = "all_reduce", **changes: Any) -> dict[str, Any]:
    return {
        "frames": [{"filename": "train.py", "line": 7, "name": "step"}],
        "record_id": number,
        "pg_id": 0,
        "process_group": (group, "default_pg" if group == "0" else "undefined"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "profiling_name": f"nccl:{operation}",
        "input_sizes": [[8]],
        "input_dtypes": ["Float"],
        "state": "completed",
        "retired": False,
        "is_p2p": False,
        **changes,
    }


def healthy() -> dict[int, list[dict[str, Any]]]:
    return {rank: [entry("0", n) for n in range(1, 6)] for rank in WORLD}


def late(number: int = 6, **changes: Any) -> dict[str, Any]:
    return entry("0", number, **{"state": "started", **changes})


def told(
    tmp_path: Path, records: dict[int, list[dict[str, Any]]], form: str = "pickle", **more: Any
) -> Finding:
    for rank, entries in records.items():
        value = {"version": "2.10", "pg_config": {}, "entries": entries, **more}
        data = pickle.dumps(value) if form == "pickle" else json.dumps(value).encode()
        (tmp_path / f"rank_{rank}").write_bytes(data)
    return diagnose_dumps(*read_dumps(tmp_path))


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_one_never_came(form: str, tmp_path: Path) -> None:
    records = healthy()
    for rank in (0, 1, 2):
        records[rank].append(late())
    found = told(tmp_path, records, form)
    assert found.where.ranks == (3,)
    assert "never came" in found.cause
    assert found.exit_code == 2
    assert "train.py:7" in found.evidence[0].text


def test_nothing_is_wrong(tmp_path: Path) -> None:
    assert told(tmp_path, healthy()).healthy


def test_gloo_says_retired_instead_of_completed(tmp_path: Path) -> None:
    records = healthy()
    for entries in records.values():
        for one in entries:
            one |= {"state": "scheduled", "retired": True, "profiling_name": "gloo:all_reduce"}
    assert told(tmp_path, records).healthy


def test_one_left_no_dump(tmp_path: Path) -> None:
    records = healthy()
    del records[2]
    for entries in records.values():
        entries.append(late())
    found = told(tmp_path, records)
    assert found.where.ranks == (2,)
    assert "left no dump" in found.cause


def test_the_last_rank_is_known_from_the_group(tmp_path: Path) -> None:
    records = healthy()
    del records[3]
    for entries in records.values():
        entries.append(late())
    found = told(tmp_path, records, pg_config={"0": {"name": "0", "ranks": "[0, 1, 2, 3]"}})
    assert found.where.ranks == (3,)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"profiling_name": "nccl:broadcast"}, "operation"),
        ({"input_sizes": [[16]]}, "size"),
        ({"input_dtypes": ["Half"]}, "size or type"),
    ],
)
def test_one_came_with_something_else(changes: Any, words: str, tmp_path: Path) -> None:
    records = healthy()
    for rank, entries in records.items():
        entries.append(late(**(changes if rank == 1 else {})))
    found = told(tmp_path, records)
    assert (found.component, found.where.ranks) == (Component.SOFTWARE, (1,))
    assert words in found.cause


def test_two_against_two_cannot_be_told(tmp_path: Path) -> None:
    records = healthy()
    for rank, entries in records.items():
        entries.append(late(input_sizes=[[8 if rank < 2 else 9]]))
    found = told(tmp_path, records)
    assert found.where.ranks == ()
    assert "cannot tell which" in found.notes[-1]


def test_who_waits_for_whom_is_followed_to_its_end(tmp_path: Path) -> None:
    records = healthy()
    for rank in WORLD:
        records[rank].append(entry("1" if rank < 2 else "2", 1))
    records[0].append(entry("1", 2, state="started"))  # waits for 1, which waits nowhere
    records[2].append(late())
    records[3].append(late())
    assert told(tmp_path, records).where.ranks == (1,)


def test_orders_that_differ(tmp_path: Path) -> None:
    records = healthy()
    for rank in (0, 1):
        records[rank].append(entry("1", 1))
    records[0].append(entry("1", 2, state="started"))
    for rank in (1, 2, 3):
        records[rank].append(late())
    found = told(tmp_path, records)
    assert (found.component, found.where.ranks) == (Component.SOFTWARE, (0,))


def test_all_came_and_it_does_not_end(tmp_path: Path) -> None:
    records = healthy()
    for entries in records.values():
        entries.append(late())
    found = told(tmp_path, records)
    assert (found.component, found.where.ranks) == (Component.NETWORK, ())


def test_a_chip_that_has_not_begun(tmp_path: Path) -> None:
    records = healthy()
    for rank, entries in records.items():
        entries.append(late(state="scheduled" if rank == 2 else "started"))
    assert told(tmp_path, records).where.ranks == (2,)


class Hostile:
    def __reduce__(self) -> Any:
        return (print, ("executed",))


def test_code_is_refused_and_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank_0").write_bytes(pickle.dumps({"entries": [Hostile()]}))
    with pytest.raises(InputError, match="holds code"):
        read_dumps(tmp_path)
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_plain_values_of_every_protocol(protocol: int) -> None:
    value = {"a": [1, -2, 3.5, None, True, "x\n", (), (1,), (1, 2), {"b": []}], "c": 2**70}
    assert plain_values(pickle.dumps(value, protocol), "x") == value


def test_damaged_dumps_are_left_out(tmp_path: Path) -> None:
    records = healthy()
    for rank in WORLD:
        records[rank].append(late())
    told(tmp_path, records)
    whole = (tmp_path / "rank_1").read_bytes()
    for cut in (1, len(whole) // 2, len(whole) - 1):
        (tmp_path / "rank_1").write_bytes(whole[:cut])
        found = diagnose_dumps(*read_dumps(tmp_path))
        assert "cut off" in found.notes[0]
        assert found.where.ranks == (1,)
    (tmp_path / "rank_1").write_bytes(b'{"entries": 3}')
    assert "is no dump" in diagnose_dumps(*read_dumps(tmp_path)).notes[0]


def test_a_folder_without_dumps_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no dump"):
        read_dumps(tmp_path)
    with pytest.raises(InputError, match="no such folder"):
        read_dumps(tmp_path / "nowhere")


def test_one_alone_in_a_group_of_unknown_members_waits_for_who_is_late(tmp_path: Path) -> None:
    # gloo does not say who is of a group: rank 0 is late in "across", which only rank 2 came to
    records = healthy()
    for rank, group in ((1, "low"), (3, "high"), (2, "across")):
        first = [entry("low", 1)] if rank == 1 else [entry("high", 1)]
        records[rank] += [*first, late(2 if group != "across" else 1, process_group=(group, "u"))]
    records[0].append(entry("low", 1))
    found = told(tmp_path, records)
    assert found.where.ranks == (0,)
    assert not any("record no messages" in note for note in found.notes)


def test_two_that_are_in_an_undeclared_group_are_not_waited_for_by_idle_ones(
    tmp_path: Path,
) -> None:
    records = healthy()
    for rank in (0, 1):
        records[rank].append(late(1, process_group=("low", "u")))
    assert told(tmp_path, records).component is Component.NETWORK


def test_several_that_never_came_may_wait_for_messages_that_are_not_recorded(
    tmp_path: Path,
) -> None:
    records = healthy()
    for rank in (2, 3):
        records[rank].append(late())
    found = told(tmp_path, records)
    assert found.where.ranks == (0, 1)  # NCCL's dumps would have the message
    for entries in records.values():
        for one in entries:
            one["profiling_name"] = one["profiling_name"].replace("nccl", "gloo")
    found = told(tmp_path, records)
    assert found.where.ranks == ()
    assert "ranks 0–1 never came" in found.cause
    assert "record no messages" in found.notes[-1]


GROUPS = {"0": (0, 1, 2, 3), "1": (0, 1), "2": (2, 3), "3": (0, 2), "4": (1, 3)}
CONFIG = {name: {"name": name, "ranks": json.dumps(ranks)} for name, ranks in GROUPS.items()}


def dumps_of_a_stop(seed: int, kept: int) -> tuple[int, dict[int, list[dict[str, Any]]], bool]:
    """Return who stops in a drawn program of sums and messages, what all recorded, and if it shows.

    Everybody calls in one order, so that nothing but the stop can hold others up.
    """
    dice = random.Random(seed)
    culprit, last = dice.randrange(4), dice.randrange(20, 60)
    held: set[int] = set()  # who stands still
    entries: dict[int, list[dict[str, Any]]] = {rank: [] for rank in WORLD}
    numbers: dict[tuple[int, str, bool], int] = {}
    shows = False
    for at in range(80):
        group, message = dice.choice(list(GROUPS)), dice.random() < 0.5
        ranks = dice.sample(GROUPS[group], 2) if message else list(GROUPS[group])
        held |= {culprit} if at >= last else set()
        come = [rank for rank in ranks if rank not in held]
        for rank in come:
            number = numbers[rank, group, message] = numbers.get((rank, group, message), 0) + 1
            a, b = (GROUPS[group].index(r) for r in ranks[:2])
            side = f"send {a}->{b}" if rank == ranks[0] else f"recv {b}<-{a}"
            entries[rank].append(entry(
                group, 0 if message else number, side if message else "all_reduce",
                p2p_seq_id=number, is_p2p=message, record_id=len(entries[rank]),
                state="completed" if len(come) == len(ranks) else "started",
            ))  # fmt: skip
        if len(come) < len(ranks):
            shows |= bool(come)
            held |= set(come)
    return culprit, {rank: own[-kept:] for rank, own in entries.items()}, shows


@pytest.mark.parametrize("kept", [80, 12])
def test_messages_are_waited_for_by_their_other_side_alone(kept: int, tmp_path: Path) -> None:
    seen = 0
    for seed in range(60):
        culprit, records, shows = dumps_of_a_stop(seed, kept)
        if not shows:
            continue
        seen += 1
        (tmp_path / f"{seed}").mkdir()
        found = told(tmp_path / f"{seed}", records, pg_config=CONFIG)
        assert found.where.ranks == (culprit,), seed
    assert seen > 40


def test_many_messages_are_not_taken_for_collectives(tmp_path: Path) -> None:
    records = healthy()
    for n in range(1, 40):
        for rank, side in ((2, "send 2->3"), (3, "recv 3<-2")):
            records[rank].append(
                entry("0", 5, side, p2p_seq_id=n, is_p2p=True, record_id=n + 9)
            )  # fmt: skip
    for rank in (0, 1, 2):
        records[rank].append(late())
    assert told(tmp_path, records).where.ranks == (3,)


def test_a_message_that_both_are_in_is_the_network(tmp_path: Path) -> None:
    records = healthy()
    for rank, side in ((0, "send 0->1"), (1, "recv 1<-0")):
        records[rank].append(entry("0", 5, side, p2p_seq_id=1, is_p2p=True, state="started"))
    found = told(tmp_path, records)
    assert (found.component, found.where.ranks) == (Component.NETWORK, ())


def write_rings(folder: Path, culprit: int, *, lost: bool = False) -> None:
    """Write rings of three ranks, of which one never comes to the third step's sum."""
    listed = [Listed(words="Forward units 0-1", lane="compute"),
              Listed(words="ClipNorm", lane="network", meets="ClipNorm")]  # fmt: skip
    for rank in range(3):
        if lost and rank == culprit:
            continue
        ring = Ring(ring_path(folder, rank), rank=rank, world=3, instructions=listed, events=64)
        for number in (1, 2, 3):
            ring.begin_step(number)
            for kind in (Kind.START, Kind.ISSUED) if number < 3 or rank != culprit else ():
                ring.note(kind, 0)
            if number == 3 and rank != culprit:
                ring.note(Kind.START, 1)
                ring.note(Kind.WAIT, 1)
            elif number < 3:
                for kind in (Kind.START, Kind.ISSUED, Kind.WAIT, Kind.DONE):
                    ring.note(kind, 1)
                ring.note(Kind.STEP_END)
        ring.close()


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("culprit", range(3))
def test_rings_of_ours(culprit: int, lost: bool, tmp_path: Path) -> None:
    write_rings(tmp_path, culprit, lost=lost)
    for path in tmp_path.iterdir():  # each process lived for a minute after its last event
        alive_ns = read_ring(path).events[-1].time_ns + 60_000_000_000
        with path.open("r+b") as file:
            file.seek(ring_file._AT_ALIVE)
            file.write(ring_file._ALIVE.pack(alive_ns))
    found = diagnose_dump_folder(tmp_path)
    assert found.where.ranks == (culprit,)


def test_rings_that_agree(tmp_path: Path) -> None:
    write_rings(tmp_path, 3)
    assert diagnose_dump_folder(tmp_path).healthy


def test_rings_that_cannot_be_used(tmp_path: Path) -> None:
    write_rings(tmp_path / RINGS, 0)
    with pytest.raises(InputError, match="tutti doctor run"):
        diagnose_dump_folder(tmp_path)
    for path in (tmp_path / RINGS).iterdir():
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match="no ring can be used"):
        diagnose_dump_folder(tmp_path / RINGS)
