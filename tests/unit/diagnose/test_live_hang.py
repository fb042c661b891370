"""The verdict on a hang: its cause is named, whoever waits is not."""

from __future__ import annotations

from typing import Any

from tutti.diagnose.runs.live_hang import Observed, Reason, find_hang, stray_of
from tutti.observe.pulse import Activity, OpenOperation, Reading

NOW = 100_000_000_000


def rank(number: int, *, idle_s: float = 6.0, links_s: float = 0.1, state: str = "S",
         waits: tuple[int, ...] = (), at: str = "Forward 1…3", call: str = "", stray: str = "",
         **changes: Any) -> Observed:  # fmt: skip
    operations = (OpenOperation("all_reduce #3", waits, 0),) if waits else ()
    values: dict[str, Any] = {
        "process": 1, "rank": number, "generation": 1, "step": 5, "instruction": 4,
        "activity": Activity.WAITING if waits else Activity.STEP, "beats": 9,
        "beat_ns": NOW - int(idle_s * 1e9), "link_beats": 9,
        "link_beat_ns": NOW - int(links_s * 1e9), "operations": operations, **changes,
    }  # fmt: skip
    return Observed(chip=f"p/0/{number}", reading=Reading(**values), state=state,
                    instruction=at, call=call, stray=stray)  # fmt: skip


def found(*ranks: Observed, **changes: Any) -> Any:
    return find_hang(ranks, now_ns=NOW, **{"after_s": 5.0, "first_step": 1, **changes})


def test_nothing_is_said_while_something_moves() -> None:
    assert found(rank(0, waits=(1,)), rank(1, idle_s=0.2)) is None
    assert found() is None


def test_whoever_waits_for_nobody_is_to_blame() -> None:
    """A chain: 0 waits for 1, 1 for 2; 2 sleeps."""
    verdict = found(rank(0, waits=(1,)), rank(1, waits=(2,)), rank(2))
    assert (verdict.rank, verdict.chip) == (2, "p/0/2")
    assert "step 5, instruction 4 (Forward 1…3): it waits for nobody" in verdict.why


def test_a_stopped_process_is_named_though_its_last_word_is_that_it_waits() -> None:
    verdict = found(rank(0, waits=(1,)), rank(1, waits=(0,), links_s=6.0, state="T"))
    assert verdict.rank == 1
    assert "its process is stopped" in verdict.why


def test_one_that_holds_the_interpreter_is_named() -> None:
    verdict = found(rank(0, waits=(1,)), rank(1, links_s=6.0, state="R"))
    assert verdict.rank == 1
    assert "interpreter" in verdict.why


def test_those_who_wait_for_each_other_are_told_apart_by_how_far_they_came() -> None:
    verdict = found(rank(0, waits=(1,), instruction=7), rank(1, waits=(0,)))
    assert verdict.rank == 1
    assert "wait for each other (all_reduce #3)" in verdict.why


def test_data_that_do_not_come_are_named() -> None:
    verdict = found(rank(0, waits=(1,)), rank(1, at="Fetch batch units 0-2"))
    assert (verdict.rank, verdict.reason) == (1, Reason.DATA)
    assert "its samples do not come" in verdict.why
    verdict = found(rank(0, waits=(1,)), rank(1, at="Fetch batch units 0-2", call="reads /a.bin"))
    assert (verdict.rank, verdict.reason) == (1, Reason.FILE)
    assert "its main thread reads /a.bin" in verdict.why


def test_what_a_process_asks_of_the_kernel_is_said() -> None:
    verdict = found(rank(0, waits=(1,)), rank(1, call="sleeps"))
    assert "its main thread sleeps, and it waits for nobody" in verdict.why


def test_who_is_in_an_operation_that_the_plan_does_not_have_is_to_blame() -> None:
    """Rank 0 waits for all in a barrier; each of the others for the one before."""
    stray = rank(0, waits=(1, 2, 3), stray="barrier #1", instruction=9)
    others = [rank(n, waits=(n - 1,), instruction=3) for n in (1, 2, 3)]
    verdict = found(stray, *others)
    assert verdict.rank == 0
    assert "it is in barrier #1, which its plan does not have" in verdict.why
    asleep = rank(3)
    assert found(stray, *others[:2], asleep).rank == 3


def test_saves_and_first_steps_are_waited_for() -> None:
    saving = rank(1, activity=Activity.BETWEEN, instruction=-1)
    assert found(rank(0, waits=(1,)), saving) is None
    assert found(rank(0, waits=(1,), step=1), rank(1, step=1)) is None
    late = rank(1, activity=Activity.BETWEEN, instruction=-1, idle_s=200.0)
    assert found(rank(0, waits=(1,), idle_s=200.0), late).rank == 1


def test_what_a_plan_does_not_have_is_known_by_its_name() -> None:
    planned = ["exchange 0.3.activations #12", "all_reduce gradients #3", "all_to_all block #1"]
    assert stray_of(planned) == ""
    assert stray_of([*planned, "all_reduce #1"]) == "all_reduce #1"
