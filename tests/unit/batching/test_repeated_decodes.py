"""A leap over many steps leaves a scheduler where the steps themselves would have left it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.batching import Request, Scheduler, Settings, Tokens
from tutti.batching.repeated_decodes import ahead, leap

COLUMNS = ("sequence", "length", "known", "computed", "stored", "num_pages", "limit", "in_flight")


def _step(scheduler: Scheduler) -> None:
    step = scheduler.next_step()
    assert step is not None
    count = len(step.sample_slots)
    scheduler.receive(Tokens(step.number, np.ones(count, np.int32), np.zeros(count, np.int8)))


def _state(scheduler: Scheduler) -> dict[str, object]:
    columns = scheduler.slots
    found: dict[str, object] = {name: getattr(columns, name).tolist() for name in COLUMNS}
    found["tokens"] = [
        columns.history[slot, : columns.known[slot]].tolist() for slot in range(len(columns.held))
    ]
    found["free"], found["steps"] = scheduler.pool.free, scheduler._steps
    return found


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(2, 60)), min_size=1, max_size=8),
    st.sampled_from([16, 64]),
    st.integers(2, 60),
    st.integers(1, 5),
    st.integers(0, 30),
)
def test_a_leap_equals_its_steps(asked, tokens, pages, slots, taken):
    sizes = Settings(
        slots=slots, pages=pages + 8, page_size=16, max_length=160, most_tokens=tokens,
        prefix=False,
    )  # fmt: skip
    one, other = Scheduler(sizes), Scheduler(sizes)
    for number, (prompt, new) in enumerate(asked):
        for scheduler in (one, other):
            if -(-(prompt + new) // 16) <= sizes.usable_pages:
                scheduler.arrive(Request(id=number, prompt=(0,) * prompt, most_new=new))
    leapt = 0
    for _ in range(900):
        if one.is_idle:
            break
        several = ahead(other, prompts=True)
        steps = min(several.steps, 1 + taken)
        if steps:
            leap(other, several, steps, 1)
            leapt += steps
        else:
            _step(other)
        for _ in range(steps or 1):
            _step(one)
        assert _state(one) == _state(other)
    assert other.is_idle == one.is_idle


def test_there_is_something_to_leap_over():
    scheduler = Scheduler(
        Settings(slots=2, pages=64, page_size=16, max_length=128, most_tokens=64, prefix=False)
    )
    scheduler.arrive(Request(id=0, prompt=(0,) * 5, most_new=50))
    assert ahead(scheduler).steps == 0
    _step(scheduler)
    several = ahead(scheduler)
    assert (several.steps, several.rows, several.keys) == (48, 1, 6)
    scheduler.arrive(Request(id=1, prompt=(0,) * 120, most_new=2))
    assert ahead(scheduler, prompts=True).steps == 0, "it will be admitted"


def test_prompts_that_take_several_steps_are_leapt_over():
    scheduler = Scheduler(
        Settings(slots=3, pages=64, page_size=16, max_length=256, most_tokens=16, prefix=False)
    )
    scheduler.arrive(Request(id=0, prompt=(0,) * 5, most_new=50))
    _step(scheduler)
    scheduler.arrive(Request(id=1, prompt=(0,) * 100, most_new=2))
    _step(scheduler)
    assert ahead(scheduler).steps == 0
    several = ahead(scheduler, prompts=True)
    assert (several.steps, several.rows, several.start, several.chunk) == (5, 1, 15, 15)
