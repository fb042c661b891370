"""Questions about whole lists: a "yes" is never wrong, whatever was done to the list."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.plans import plans
from tutti.schedule.check import check_schedule
from tutti.schedule.columns import Columns
from tutti.schedule.instruction import Op, What
from tutti.schedule.schedule import Schedule, build_schedule

QUESTIONS = ("waits_for_earlier", "is_waited_for", "passes_fit", "moves_fit")
FEW = settings(max_examples=max(50, settings.default.max_examples))


def one_by_one(schedule: Schedule) -> list[str]:
    """Return what the check finds when every question is answered "look closer"."""
    with mock.patch.multiple(Columns, **{name: lambda *_: False for name in QUESTIONS}):
        return check_schedule(schedule)


@st.composite
def broken_schedules(draw: st.DrawFn) -> Schedule:
    """Change one instruction of one class, or the order of two."""
    schedule = build_schedule(draw(plans()))
    classes = list(schedule.classes)
    chosen = draw(st.integers(0, len(classes) - 1))
    entries = list(classes[chosen].instructions)
    index = draw(st.integers(0, len(entries) - 1))
    entry = entries[index]
    change = draw(
        st.sampled_from(["swap", "drop", "twice", "op", "what", "units", "micro_batch", "after"])
    )
    if change == "swap":
        other = draw(st.integers(0, len(entries) - 1))
        entries[index], entries[other] = entries[other], entry
    elif change == "drop":
        del entries[index]
    elif change == "twice":
        entries.append(entry._replace(after=()))
    else:
        field = {
            "op": {"op": draw(st.sampled_from(Op))},
            "what": {"what": draw(st.sampled_from(What))},
            "units": {"start": draw(st.integers(0, 9)), "stop": draw(st.integers(0, 9))},
            "micro_batch": {"micro_batch": draw(st.integers(-1, 9))},
            "after": {"after": tuple(draw(st.lists(st.integers(-1, len(entries)), max_size=2)))},
        }[change]
        entries[index] = entry._replace(**field)
    classes[chosen] = replace(classes[chosen], instructions=tuple(entries))
    return replace(schedule, classes=tuple(classes))


@FEW
@given(broken_schedules())
def test_the_quick_look_finds_what_the_long_one_does(schedule):
    assert check_schedule(schedule) == one_by_one(schedule)


@FEW
@given(plans())
def test_lists_as_they_are_written_need_no_closer_look(plan):
    schedule = build_schedule(plan)
    slow = dict.fromkeys(("_class_passes", "_expected_moves"), mock.Mock(side_effect=ValueError))
    with mock.patch.multiple("tutti.schedule.check", **slow):
        assert check_schedule(schedule) == []
