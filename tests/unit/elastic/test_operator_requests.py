"""What people ask of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tutti.elastic.journal import Entry, Journal, read_journal
from tutti.elastic.messages import Seat
from tutti.elastic.operator_requests import OperatorRequest, OperatorRequests, wish
from tutti.elastic.restore import restored
from tutti.errors import InputError

SEATS = tuple(
    Seat(rank=n, chip=f"a/{n}/0", host=f"a/{n}", process=1, incarnation=n + 7) for n in range(2)
)


def run(folder: Path, *phases: str) -> Path:
    journal = Journal(folder)
    for order, phase in enumerate(phases):
        entering = phase == "entering"
        journal.write(
            Entry(
                at=1.0, generation=3, phase=phase, why="why", plan="p" if entering else "",
                ranks=tuple(s.chip for s in SEATS) if entering else (),
                seats=SEATS if entering else (), order=order,
            )
        )  # fmt: skip
    journal.close()
    return folder


def test_a_wish_is_taken_once(tmp_path: Path) -> None:
    run(tmp_path, "entering", "running")
    wish(tmp_path, OperatorRequest(kind="drain", place="a/1"))
    wish(tmp_path, OperatorRequest(kind="replan"))
    (tmp_path / "elastic" / "wish-0-nonsense.json").write_text("{", encoding="utf-8")
    found = list(OperatorRequests(tmp_path).take())
    assert found == [OperatorRequest(kind="drain", place="a/1"), OperatorRequest(kind="replan")]
    assert list(OperatorRequests(tmp_path).take()) == []


@pytest.mark.parametrize(
    ("place", "words"),
    [("b/0", "it had a/0, a/1"), ("a", "write POOL/NODE"), ("a/x", "write POOL/NODE")],
)
def test_places_that_are_none(tmp_path: Path, place: str, words: str) -> None:
    run(tmp_path, "entering")
    with pytest.raises(InputError, match=words):
        wish(tmp_path, OperatorRequest(kind="drain", place=place))


def test_a_run_that_is_over_takes_no_wishes(tmp_path: Path) -> None:
    run(tmp_path, "entering", "running", "finished")
    with pytest.raises(InputError, match=r"the run is over \(finished: why\)"):
        wish(tmp_path, OperatorRequest(kind="replan"))
    with pytest.raises(InputError, match="no elastic run"):
        wish(tmp_path / "nowhere", OperatorRequest(kind="replan"))


def test_a_lost_controller_waits_for_the_hosts_of_the_last_generation(tmp_path: Path) -> None:
    members = restored("job", read_journal(run(tmp_path, "entering", "running")))
    assert members is not None
    assert (members.generation, members.order, members.seats) == (3, 2, SEATS)
    assert [name for name, _ in members.hosts] == ["a/0", "a/1"]
    assert all(members.seated(seat) is not None for seat in SEATS)
    assert not members._all_left()
    over = tmp_path / "over"
    over.mkdir()
    assert restored("job", read_journal(run(over, "entering", "finished"))) is None
