"""States as a few numbers lead where the states lead, and are told apart as they are."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from benchmarks.elastic_states import explore_by_many
from tests.support import elastic_world as world
from tests.support.elastic_exploration import Fresh, digest_of_alike
from tests.support.elastic_fingerprints import Fingerprints
from tests.support.elastic_moves import moves
from tests.support.elastic_packed import Packed
from tests.unit.elastic.test_membership_states import BUGS


def digests_of_all(start: world.World) -> set[bytes]:
    """Return what tells the states apart that can be reached, as they are."""
    fresh = Fresh()
    todo = [fresh.settled(start)]
    seen = {digest_of_alike(todo[0])}
    while todo:
        for _, following in moves(todo.pop()):
            after = fresh(following)
            if after is not None and digest_of_alike(after) not in seen:
                seen.add(digest_of_alike(after))
                todo.append(after)
    return seen


def packed_digests_of_all(start: world.World) -> set[bytes]:
    """Return the same of those that are gone through as numbers, told apart by fingerprints."""
    packed = Packed(len(start.agents))
    fingerprints = Fingerprints(packed)
    todo = [packed.visited(packed.of(start))]
    seen, digests = {fingerprints.of(todo[0])}, set[bytes]()
    while todo:
        state = todo.pop()
        digests.add(digest_of_alike(packed.world(state)))
        for after in packed.following(state):
            if fingerprints.of(after) not in seen:
                seen.add(fingerprints.of(after))
                todo.append(after)
    assert len(digests) == len(seen)
    return digests


@pytest.mark.parametrize("late", [0, world.ANY])
def test_two_hosts_and_a_fault_have_the_same_states(late: int) -> None:
    start = world.begin(2, faults=1, newcomers=0, late=late)
    assert packed_digests_of_all(start) == digests_of_all(start)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("hosts", "faults", "newcomers", "late"),
    [(3, 1, 0, 0), (2, 2, 0, 0), (2, 1, 1, 0), (2, 1, 0, 1)],
)
def test_more_hosts_and_faults_have_the_same_states(
    hosts: int, faults: int, newcomers: int, late: int
) -> None:
    start = world.begin(hosts, faults=faults, newcomers=newcomers, late=late)
    digests = packed_digests_of_all(start)
    assert digests == digests_of_all(start)
    row = explore_by_many(start, workers=2, minutes=10)
    assert row["whole"]
    assert row["visited"] == len(digests)


def test_drawn_ways_through_three_hosts_two_faults_and_a_newcomer_lead_to_the_same() -> None:
    draw = random.Random(321)
    for _ in range(6):
        late, wishes = draw.choice([0, 2, world.ANY]), draw.choice([0, 1])
        state = Fresh().settled(world.begin(3, 2, 1, late=late, wishes=wishes))
        packed = Packed(4)
        fingerprints, settled = Fingerprints(packed), Fresh().settled
        number = packed.visited(packed.of(state))
        for _ in range(40):
            following = [settled(after) for _, after in moves(state)]
            numbers = list(packed.following(number))
            as_they_are = [digest_of_alike(after) for after in following]
            assert [digest_of_alike(packed.world(n)) for n in numbers] == as_they_are
            told = {
                fingerprints.of(n): digest for n, digest in zip(numbers, as_they_are, strict=True)
            }
            assert len(told) == len(set(as_they_are))
            if not following:
                break
            at = draw.randrange(len(following))
            state, number = following[at], numbers[at]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_planted_bugs_are_found(bug: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError, match="Error"):
        explore_by_many(
            world.begin(2, faults=1, newcomers=0, late=0), workers=1, minutes=2, liveness_every=5
        )


def test_room_for_too_few_states_is_said() -> None:
    start = world.begin(2, faults=1, newcomers=0, late=0)
    with pytest.raises(AssertionError, match="no room for more states; give more --bits"):
        explore_by_many(start, workers=1, minutes=2, bits=8)
