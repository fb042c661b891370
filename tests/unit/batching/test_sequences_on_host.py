"""Sequences that lose their slots: computed anew, or kept on the host, as is priced cheaper."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.fake_chip import check_host_pages
from tutti.batching import LinearPrices, Request, Scheduler, Settings, Step, Tokens
from tutti.batching.imported import import_prefix
from tutti.errors import InputError

SETTINGS = Settings(
    slots=2, pages=17, page_size=4, max_length=64, most_tokens=33, prefix=False, host_pages=16
)
# a prompt of 4 tokens: one page, 0.6 s of moves against 0.04 s of tokens and 0.1 s of pairs; one
# of 32: eight pages, 4.8 s against 0.32 and 5.28
PRICES = LinearPrices(step_s=1.0, token_s=0.01, pair_s=0.01, stow_s=0.3, fetch_s=0.3)


def answered(scheduler: Scheduler, step: Step) -> None:
    count = len(step.sample_slots)
    scheduler.receive(Tokens(step.number, np.full(count, 7, np.int32), np.zeros(count, np.int8)))


def made(scheduler: Scheduler) -> Step:
    step = scheduler.next_step()
    assert step is not None
    return step


def displaced(scheduler: Scheduler, length: int) -> Step:
    """Return the step that takes the slot of a sequence for one of a higher priority."""
    scheduler.arrive(Request(id=0, prompt=tuple(range(length)), most_new=8))
    answered(scheduler, made(scheduler))
    scheduler.arrive(Request(id=1, prompt=(1,) * 32, most_new=30, priority=1))
    return made(scheduler)


@pytest.mark.parametrize(("length", "moved"), [(4, 0), (32, 8)])
def test_what_is_cheaper_is_done(length: int, moved: int) -> None:
    settings = replace(SETTINGS, pages=SETTINGS.pages if length == 32 else 10)
    scheduler = Scheduler(settings, PRICES)
    scheduler.arrive(Request(id=0, prompt=tuple(range(length)), most_new=8))
    answered(scheduler, made(scheduler))
    scheduler.arrive(Request(id=1, prompt=(1,) * 32, most_new=2, priority=1))
    step = made(scheduler)
    assert step.sequences.tolist() == [1]
    assert len(step.stows) == moved
    answered(scheduler, step)
    while 0 not in (step := made(scheduler)).sequences.tolist():
        answered(scheduler, step)
    row = step.sequences.tolist().index(0)
    assert step.starts[row] == (length if moved else 0)
    assert step.queries[row] == (1 if moved else length + 1)
    assert len(step.fetches) == moved
    check_host_pages(scheduler)
    assert scheduler.on_host.pool.free == settings.host_pages


def test_without_prices_or_room_everything_is_computed_anew() -> None:
    for settings, prices, moved in (
        (SETTINGS, None, 0),
        (replace(SETTINGS, keep_on_host="always"), None, 8),
        (replace(SETTINGS, host_pages=7), PRICES, 0),
        (replace(SETTINGS, host_pages=0), PRICES, 0),
    ):
        assert len(displaced(Scheduler(settings, prices), 32).stows) == moved
    with pytest.raises(InputError, match="'host_pages' is -1"):
        replace(SETTINGS, host_pages=-1)
    with pytest.raises(InputError, match="'keep_on_host' is 'never'"):
        replace(SETTINGS, keep_on_host="never")


def test_what_the_prefix_tree_still_has_is_not_fetched() -> None:
    scheduler = Scheduler(replace(SETTINGS, prefix=True), PRICES)
    step = displaced(scheduler, 32)
    assert len(step.stows) == 8
    kept = len(scheduler.pool.idle)
    assert kept == 8, "the other needs eight of sixteen pages"
    answered(scheduler, step)
    scheduler.cancel(1)
    step = made(scheduler)
    assert step.starts.tolist() == [32]
    assert not len(step.fetches), "all of its pages are in the tree"
    check_host_pages(scheduler)


def test_who_is_cancelled_on_the_host_gives_its_pages_back() -> None:
    scheduler = Scheduler(SETTINGS, PRICES)
    answered(scheduler, displaced(scheduler, 32))
    assert scheduler.on_host.pool.free == 8
    scheduler.cancel(0)
    assert scheduler.on_host.pool.free == 16
    check_host_pages(scheduler)


def test_pages_leave_before_imported_ones_are_written() -> None:
    """A page that is to move out may be given to keys and values from elsewhere."""
    scheduler = Scheduler(replace(SETTINGS, pages=11, prefix=True), PRICES)
    scheduler.arrive(Request(id=0, prompt=tuple(range(32)), most_new=8))
    step = made(scheduler)
    scheduler.arrive(Request(id=1, prompt=(1,) * 32, most_new=2, priority=1))
    assert scheduler.next_step() is None, "who gives way is still computed"
    answered(scheduler, step)
    found = import_prefix(scheduler, [1] * 32)
    assert set(found.pages.tolist()) & set(found.stows[:, 0].tolist())
    assert len(found.stows) == 8
    assert not len(made(scheduler).stows), "they have left already"
