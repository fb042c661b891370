"""Dumps of flight recorders: read without executing them, and the rank that the others wait for."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from tutti.diagnose.dumps.records import read_dumps
from tutti.diagnose.dumps.values import plain_values
from tutti.diagnose.dumps.verdict import diagnose_dumps
from tutti.diagnose.finding import Component, Finding
from tutti.errors import InputError

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
    assert found.where.ranks == (0, 1)
    assert "record no messages" in found.notes[-1]
