"""Blame: who explains what paths lost, and who cannot be told apart."""

from __future__ import annotations

import itertools
import random

import pytest

from tutti.diagnose.fabric.likelihood import PathTrials, blame

LEAVES, SPINES, HOSTS = 3, 4, 3


def _paths(chance: dict[str, float], trials: int, seed: int) -> list[PathTrials]:
    """Return trials of every path of a small Clos network whose parts lose with these chances."""
    dice, found = random.Random(seed), []
    for a, b in itertools.permutations(range(LEAVES * HOSTS), 2):
        if a // HOSTS == b // HOSTS:
            continue
        for spine in range(SPINES):
            nodes = [f"h{a}", f"l{a // HOSTS}", f"s{spine}", f"l{b // HOSTS}", f"h{b}"]
            links = [f"{x}>{y}" for x, y in itertools.pairwise(nodes)]
            parts = (*links, *nodes[1:-1])
            bad = sum(
                any(dice.random() < chance.get(part, 0.0) for part in parts) for _ in range(trials)
            )
            found.append(PathTrials(parts=parts, trials=trials, bad=bad))
    return found


@pytest.mark.parametrize("part", ["l1>s2", "s0>l2", "h4>l1", "l2>h7", "s3"])
@pytest.mark.parametrize("chance", [1.0, 1 / 32])
def test_a_bad_part_is_named_alone(part: str, chance: float) -> None:
    found = blame(_paths({part: chance}, 24, seed=5), background=0.001, enough=12.0)
    assert [one.parts for one in found] == [(part,)]
    assert found[0].bad > 0


def test_two_bad_links_are_both_named() -> None:
    found = blame(_paths({"l0>s1": 1.0, "s3>l2": 0.1}, 12, seed=3), background=0.001, enough=12.0)
    assert {one.parts for one in found} == {("l0>s1",), ("s3>l2",)}


def test_stray_losses_accuse_nobody() -> None:
    dice = random.Random(1)
    paths = [
        PathTrials(parts=one.parts, trials=24, bad=dice.random() < 0.02)
        for one in _paths({}, 1, seed=0)
    ]
    assert blame(paths, background=0.001, enough=12.0) == []
    assert blame([], background=0.001, enough=12.0) == []


def test_what_lies_on_the_same_paths_is_named_together() -> None:
    """Two links in a row without another way in or out."""
    paths = [
        PathTrials(parts=("a", "b"), trials=20, bad=20),
        PathTrials(parts=("c",), trials=20, bad=0),
    ]
    (one,) = blame(paths, background=0.001, enough=12.0)
    assert one.parts == ("a", "b")
