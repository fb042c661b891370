"""Hangs of elastic runs, from what agents wrote of ranks that did not move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tutti.diagnose.finding import Component
from tutti.diagnose.runs.stalled_ranks import diagnose_still
from tutti.elastic.messages import ChipPulse, Order, Seat
from tutti.elastic.stalled_ranks_file import StillFile
from tutti.observe.folder import RINGS
from tutti.observe.pulse import Activity
from tutti.observe.stalled_ranks import Still, read_still, still_path, write_still

SEATS = tuple(Seat(rank=r, chip=f"p/{r}/0", host=f"p/{r}", process=1) for r in range(2))


def still(rank: int, **changes: Any) -> Still:
    values: dict[str, Any] = {
        "rank": rank, "chip": f"p/{rank}/0", "generation": 3, "step": 7, "instruction": 2,
        "activity": int(Activity.WAITING), "idle_s": 4.0, "links_idle_s": 0.1, "state": "S",
        "call": "", "operations": (("exchange x #4", (1 - rank,)),), **changes,
    }  # fmt: skip
    return Still(**values)


@pytest.mark.parametrize(
    ("changes", "component", "words"),
    [
        ({"state": "T", "links_idle_s": 4.0}, Component.HOST, "its process is stopped"),
        ({"links_idle_s": 4.0}, Component.SOFTWARE, "interpreter's lock"),
        ({"operations": (("barrier #1", (0,)),)}, Component.SOFTWARE, "barrier #1"),
        ({"operations": (), "call": "reads /a"}, Component.STORAGE, "main thread reads /a"),
        ({"operations": (), "call": "sleeps"}, Component.SOFTWARE, "main thread sleeps"),
        ({"operations": ()}, Component.UNDETERMINED, "starts nothing"),
    ],
)
def test_the_culprit_and_its_reason(
    changes: dict[str, Any], component: Component, words: str
) -> None:
    finding = diagnose_still([still(0), still(1, **changes)], [])
    assert finding is not None
    assert (finding.where.ranks, finding.component) == ((1,), component)
    assert words in finding.cause
    assert "step 7, instruction 2" in finding.cause
    assert finding.evidence[0].rank == 1


def test_ranks_that_take_their_time_are_no_finding() -> None:
    assert diagnose_still([], []) is None
    assert diagnose_still([still(0, idle_s=1.2), still(1)], []) is None
    saving = still(1, operations=(), activity=int(Activity.SAVING), instruction=-1)
    assert diagnose_still([still(0), saving], []) is None


def test_agents_write_while_nothing_moves_and_take_it_back(tmp_path: Path) -> None:
    (tmp_path / RINGS).mkdir()
    order = Order(job="j", number=1, generation=3, kind="enter", seats=SEATS)
    pulses = [
        ChipPulse(chip=f"p/{r}/0", generation=3, step=7, instruction=2, activity=2,
                  idle_ns=2_000_000_000, links_idle_ns=0, state="S", call="sleeps",
                  operations=(("barrier #1", (1 - r,)),))
        for r in range(2)
    ]  # fmt: skip
    files = [StillFile(tmp_path, f"p/{r}") for r in range(2)]
    files[0].take(pulses[:1], order)
    assert read_still(tmp_path / RINGS) == []  # something moves on the other host
    files[1].take(pulses[1:], order)
    found = read_still(tmp_path / RINGS)
    assert [(one.rank, one.chip, one.idle_s, one.call) for one in found] == [
        (0, "p/0/0", 2.0, "sleeps"), (1, "p/1/0", 2.0, "sleeps"),
    ]  # fmt: skip
    assert found[0].operations == (("barrier #1", (1,)),)
    files[1].take((), order)
    assert read_still(tmp_path / RINGS) == []
    still_path(tmp_path / RINGS, "p/1").write_text("{", encoding="utf-8")
    assert read_still(tmp_path / RINGS) == []


def test_what_an_earlier_generation_left_does_not_count(tmp_path: Path) -> None:
    write_still(still_path(tmp_path, "p/0"), 1, [still(0, generation=4)])
    write_still(still_path(tmp_path, "p/1"), 2, [still(1)])
    assert [one.generation for one in read_still(tmp_path)] == [4]
