"""The scheduler's choices, one at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tutti.batching import (
    Finish,
    LinearPrices,
    Request,
    Scheduler,
    Sequence,
    Settings,
    Step,
    Tokens,
)
from tutti.batching.step import LAST
from tutti.errors import InputError

SETTINGS = Settings(slots=4, pages=33, page_size=4, max_length=64, most_tokens=16)


def request(number: int, length: int = 6, new: int = 3, **options: object) -> Request:
    return Request(id=number, prompt=tuple(range(length)), most_new=new, **options)  # type: ignore[arg-type]


def run(scheduler: Scheduler, step: Step, token: int = 7) -> tuple[Sequence, ...]:
    count = len(step.sample_slots)
    made = Tokens(step.number, np.full(count, token, np.int32), np.zeros(count, np.int8))
    return scheduler.receive(made).finished


def drain(scheduler: Scheduler) -> list[Sequence]:
    found: list[Sequence] = []
    while (step := scheduler.next_step()) is not None:
        found += run(scheduler, step)
    return found


def test_decodes_go_first_and_prompts_fill_the_rest() -> None:
    scheduler = Scheduler(SETTINGS)
    scheduler.arrive(request(0))
    first = scheduler.next_step()
    assert first is not None
    assert first.queries.tolist() == [6]
    run(scheduler, first)
    scheduler.arrive(Request(id=1, prompt=tuple(range(100, 140)), most_new=2))
    second = scheduler.next_step()
    assert second is not None
    assert second.queries.tolist() == [1, 15], "one token of the first, a chunk of the second"
    assert second.sample_slots.tolist() == [0], "a prompt's chunk samples nothing"
    assert second.starts.tolist() == [6, 0]
    run(scheduler, second)
    third = scheduler.next_step()
    assert third is not None
    assert third.tokens.tolist()[1:] == list(range(115, 130))
    assert sorted(s.id for s in run(scheduler, third) + tuple(drain(scheduler))) == [0, 1]


def test_a_chunk_keeps_the_priced_target() -> None:
    prices = LinearPrices(step_s=1.0, token_s=0.1)
    scheduler = Scheduler(replace(SETTINGS, target_s=1.75), prices)
    scheduler.arrive(request(0, new=10))
    step = scheduler.next_step()
    assert step is not None
    assert step.num_tokens == 6, "nobody decodes: nobody waits for the step"
    run(scheduler, step)
    scheduler.arrive(request(1, length=30))
    step = scheduler.next_step()
    assert step is not None
    assert step.queries.tolist() == [1, 6], "1.0 + 7 · 0.1 = 1.7 s; the seventh would be 1.8"
    with pytest.raises(InputError, match="a latency target needs prices"):
        Scheduler(replace(SETTINGS, target_s=1.0))


def test_a_prefix_is_computed_once() -> None:
    scheduler = Scheduler(SETTINGS)
    scheduler.arrive(request(0, length=12))
    drain(scheduler)
    (again,) = scheduler.arrive(request(1, length=13))
    step = scheduler.next_step()
    assert step is not None
    assert step.queries.tolist() == [1], "three pages of twelve tokens are there"
    assert again.cached == 12
    drain_of = run(scheduler, step) + tuple(drain(scheduler))
    assert len(drain_of) == 1
    (other,) = scheduler.arrive(request(2, length=13, salt="x"))
    assert scheduler.next_step() is not None
    assert other.cached == 0, "another salt shares nothing"


def test_samples_share_pages_and_copy_the_one_they_write_to() -> None:
    scheduler = Scheduler(SETTINGS)
    scheduler.arrive(request(0, samples=3))
    first = scheduler.next_step()
    assert first is not None
    assert first.sample_rows.tolist() == [0, 0, 0]
    assert [b.fork_of for b in first.begins] == [None, 0, 0]
    assert scheduler.pool.available == 30
    run(scheduler, first)
    second = scheduler.next_step()
    assert second is not None
    assert len(second.copies) == 2, "the last of three keeps the page"
    assert scheduler.pool.available == 28
    assert len(run(scheduler, second) + tuple(drain(scheduler))) == 3


def test_a_step_ahead_does_not_know_its_tokens() -> None:
    scheduler = Scheduler(replace(SETTINGS, ahead=2))
    scheduler.arrive(request(0))
    first = scheduler.next_step()
    second = scheduler.next_step()
    assert first is not None
    assert second is not None
    assert second.tokens.tolist() == [LAST]
    assert scheduler.next_step() is None, "two are under way"
    ended = Tokens(first.number, np.array([9], np.int32), np.array([1], np.int8))
    assert scheduler.receive(ended).finished == (), "its slot is in the second step"
    (sequence,) = run(scheduler, second, token=8)
    assert sequence.new_tokens == [9], "what came after the end does not count"
    assert sequence.finish is Finish.STOP


def test_a_higher_priority_takes_the_place_of_a_lower_one_but_not_of_who_waited_long() -> None:
    scheduler = Scheduler(replace(SETTINGS, slots=1, aging=3.0))
    scheduler.arrive(request(0, new=30))
    step = scheduler.next_step()
    assert step is not None
    run(scheduler, step)
    scheduler.arrive(request(1, priority=1))
    step = scheduler.next_step()
    assert step is not None
    assert step.sequences.tolist() == [1]
    done = list(run(scheduler, step))
    for _ in range(8):
        step = scheduler.next_step()
        assert step is not None
        done += run(scheduler, step)
    scheduler.arrive(request(2, priority=1))
    step = scheduler.next_step()
    assert step is not None
    assert step.sequences.tolist() == [0], "it has waited for more than three steps"
    (first, *_) = done
    assert first.id == 1
    done += list(run(scheduler, step)) + drain(scheduler)
    assert [s.preemptions for s in sorted(done, key=lambda s: s.id)] == [1, 0, 0]


def test_pages_behind_the_window_are_free_again() -> None:
    scheduler = Scheduler(replace(SETTINGS, window=8, prefix=False))
    scheduler.arrive(request(0, length=40, new=4))
    used = []
    while (step := scheduler.next_step()) is not None:
        used.append(32 - scheduler.pool.available)
        run(scheduler, step)
    assert max(used) <= scheduler.settings.most_pages(44)
    assert scheduler.settings.most_pages(44) < 11


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (request(0, length=0), "the prompt is empty"),
        (request(0, length=60, new=10), "60 tokens and 10 new ones are 70; the context holds 64"),
        (request(0, new=-1), "-1 new tokens"),
    ],
)
def test_a_request_that_cannot_be_is_refused(wrong: Request, line: str) -> None:
    with pytest.raises(InputError, match=line):
        Scheduler(SETTINGS).arrive(wrong)


def test_a_request_larger_than_all_pages_is_refused() -> None:
    with pytest.raises(InputError, match=r"its 40 tokens need 10 pages of 4; there are 6 in all"):
        Scheduler(replace(SETTINGS, pages=7)).arrive(request(0, length=36, new=4))
    with pytest.raises(InputError, match="'slots' is 0; it must be at least 1"):
        replace(SETTINGS, slots=0)
    with pytest.raises(InputError, match="1 pages leave none"):
        replace(SETTINGS, pages=1)


def test_who_is_displaced_on_outgrowing_its_keys_is_computed_with_the_long_ones() -> None:
    scheduler = Scheduler(replace(SETTINGS, slots=1, stretch=5, stretch_kind="switch"))
    scheduler.arrive(request(0, length=4, new=6))
    for _ in range(2):
        step = scheduler.next_step()
        assert step is not None
        run(scheduler, step)
    scheduler.arrive(request(1, length=3, new=1, priority=1))  # while the first has 6 tokens
    seen = []
    while (step := scheduler.next_step()) is not None:
        seen += zip(
            step.sequences.tolist(), step.queries.tolist(), step.bases.tolist(), strict=True
        )
        run(scheduler, step)
    assert seen[:2] == [(1, 3, 3), (0, 6, 6)]


def test_samples_fork_off_the_prompt_though_somebody_guesses() -> None:
    """The prompt's last token comes alone: what is tried behind it would belong to one sample."""
    scheduler = Scheduler(replace(SETTINGS, most_tokens=5))
    first, second = scheduler.arrive(request(0, samples=2))
    step = scheduler.next_step()
    assert step is not None
    assert step.queries.tolist() == [5]
    run(scheduler, step)
    scheduler.guess({first.id: (7, 7), second.id: (7, 7)})
    step = scheduler.next_step()
    assert step is not None
    assert step.queries.tolist() == [1], "nothing is tried"
    assert [begin.sequence.id for begin in step.begins] == [second.id]
    assert step.sample_slots.tolist() == [0, 1]
    run(scheduler, step)
    scheduler.guess({first.id: (7, 7)})
    step = scheduler.next_step()
    assert step is not None
    assert sorted(step.queries.tolist()) == [1, 2], "later it is, up to the last token but one"
