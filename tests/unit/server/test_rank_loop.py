"""The first rank of a planned engine, and what its followers hear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.support.engines import engine_of
from tests.support.models import make, spec_of
from tutti.serve.laned_engine import LanedEngine
from tutti.server.engine_process import parameters_of
from tutti.server.grammar import Grammars
from tutti.server.messages import FromEngine, Refused, Submit, Wishes
from tutti.server.rank_broadcast import Add, Forget
from tutti.server.rank_loop import PlannedLoop, added

SIZES: dict[str, Any] = {"slots": 2, "page_size": 4, "pages": 20, "most_tokens": 8}
REFUSED = {
    "a token that the vocabulary lacks": Submit(1, [10**6], Wishes(max_tokens=2)),
    "nothing to go on from": Submit(1, [], Wishes(max_tokens=2)),
    "a temperature that cannot be": Submit(1, [5], Wishes(max_tokens=2, temperature=-1.0)),
    "longer than the context": Submit(1, [5], Wishes(max_tokens=10**6)),
    "an adapter that is not there": Submit(1, [5], Wishes(max_tokens=2, adapter="x")),
}


def ranks() -> tuple[PlannedLoop, LanedEngine, list[FromEngine]]:
    """Return a first rank, a follower of it, and what clients are told."""
    first, follower = (LanedEngine([engine_of(make(spec_of("dense")), **SIZES)]) for _ in range(2))
    loop = PlannedLoop(first, None, Grammars(Path(), 0, ()), None, None, frozenset())  # type: ignore[arg-type]
    said: list[FromEngine] = []
    unheard: Any = loop
    unheard._send = lambda _client, more: said.extend(more)
    return loop, follower, said


@pytest.mark.parametrize("wrong", REFUSED)
def test_a_refusal_leaves_all_ranks_at_the_same_number(wrong: str) -> None:
    loop, follower, said = ranks()
    loop._handle(b"api0", REFUSED[wrong])
    assert [type(one) for one in said] == [Refused]
    assert not loop._words, "followers do not hear of it"
    loop._handle(b"api0", Submit(2, [5, 9, 2], Wishes(max_tokens=2)))
    (word,) = loop._words
    assert isinstance(word, Add)
    number = added(follower, word, parameters_of(word.wishes, loop._grammars))
    assert loop._numbers == {(b"api0", 2): number}


def test_keys_and_values_of_a_refused_request_are_forgotten_by_all() -> None:
    loop, _, said = ranks()
    loop._add(b"api0", Submit(1, [5], Wishes(max_tokens=2)), "nobody/1")
    assert said == [Refused(1, "keys and values 'nobody/1' were to be here")]
    assert loop._words == [Forget("nobody/1")]
    loop._handle(b"api0", Submit(2, [5], Wishes(max_tokens=2)))
    assert loop._numbers == {(b"api0", 2): 0}


def test_a_failure_halfway_ends_the_rank() -> None:
    """It may be ahead of its followers: a restart of all of them is the only way back."""
    loop, _, said = ranks()

    def fail(*_args: object) -> None:
        raise ZeroDivisionError

    worker: Any = loop._laned.lanes[0].worker
    worker.expect = fail
    with pytest.raises(ZeroDivisionError):
        loop._handle(b"api0", Submit(1, [5], Wishes(max_tokens=2)))
    assert said == []
