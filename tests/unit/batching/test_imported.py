"""Pages of keys and values that another engine computed."""

from __future__ import annotations

import numpy as np

from tutti.batching import Request, Scheduler, Settings
from tutti.batching.events import Tokens
from tutti.batching.imported import import_prefix

TOKENS = list(range(100, 111))


def scheduler(pages: int = 12, **options: object) -> Scheduler:
    return Scheduler(
        Settings(slots=2, pages=pages, page_size=4, max_length=32, most_tokens=16, **options)  # type: ignore[arg-type]
    )


def queries(own: Scheduler, prompt: list[int], **options: int) -> list[int]:
    own.arrive(Request(id=1, prompt=tuple(prompt), most_new=2, **options))
    step = own.next_step()
    assert step is not None
    return step.queries.tolist()


def test_a_request_finds_what_was_imported() -> None:
    own = scheduler()
    first, pages, _ = import_prefix(own, TOKENS)
    assert first == 0
    assert len(pages) == 2, "whole pages only"
    assert own.pool.available == own.pool.size, "nobody uses them yet"
    assert queries(own, [*TOKENS, 5], answered=1) == [4]


def test_what_is_known_is_not_imported_again() -> None:
    own = scheduler()
    import_prefix(own, TOKENS[:4])
    first, pages, _ = import_prefix(own, TOKENS)
    assert (first, len(pages)) == (4, 1)
    again, none, _ = import_prefix(own, TOKENS)
    assert (again, len(none)) == (8, 0)
    assert import_prefix(own, TOKENS, salt="other").first == 0


def test_pages_reach_as_far_as_there_are() -> None:
    own = scheduler(pages=2)
    first, pages, _ = import_prefix(own, TOKENS)
    assert (first, len(pages)) == (0, 1)
    own = scheduler(pages=6)
    own.arrive(Request(id=9, prompt=tuple(range(12)), most_new=1))
    step = own.next_step()
    assert step is not None
    _, pages, _ = import_prefix(own, TOKENS)
    assert len(pages) == 1, "one is left for who runs"
    count = len(step.sample_slots)
    own.receive(Tokens(step.number, np.ones(count, np.int32), np.zeros(count, np.int8)))
    assert own.pool.available == own.pool.size


def test_keys_that_hang_on_the_prompts_length_are_found_by_it() -> None:
    own = scheduler(stretch=6, stretch_kind="grow")
    import_prefix(own, TOKENS, base=len(TOKENS))
    assert queries(own, [*TOKENS, 5], answered=1) == [4]
    own = scheduler(stretch=6, stretch_kind="grow")
    import_prefix(own, TOKENS, base=len(TOKENS))
    assert queries(own, [*TOKENS, 5]) == [12], "a prompt of another length has other keys"
