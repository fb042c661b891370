"""Ranks that meet are of one mind, or it is said who is not, or who is missing."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.support.plans import small_model
from tutti.errors import TuttiError
from tutti.ranks.rendezvous import agree, wait_for


class FakeStore:
    """Keys in a dictionary; what is not there never comes."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.awaited: list[list[str]] = []

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self.values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        assert timeout.total_seconds() == 3
        self.awaited.append(list(keys))
        if not self.check(keys):
            raise RuntimeError("wait timeout")


OWN = {"tutti version": "1.0", "plan": "abc", "seed": "0"}


def meet(facts: dict[int, dict[str, str]], world: int, rank: int = 0) -> None:
    store: Any = FakeStore()
    for other, theirs in facts.items():
        if other != rank:
            agree(store, other, 0, theirs, 3)
    agree(store, rank, world, facts[rank], 3)


def test_all_of_one_mind() -> None:
    meet(dict.fromkeys(range(4), OWN), 4)


def test_who_differs_is_named() -> None:
    with pytest.raises(TuttiError, match=r"rank 2 has tutti version '0.9', rank 0 has '1.0'"):
        meet({0: OWN, 1: OWN, 2: {**OWN, "tutti version": "0.9"}}, 3)
    with pytest.raises(TuttiError, match="rank 0 has seed None, rank 1 has '0'"):
        meet({0: {"plan": "abc", "tutti version": "1.0"}, 1: OWN}, 2, rank=1)


def test_who_is_missing_is_named() -> None:
    with pytest.raises(TuttiError, match="after 3 s these ranks have not come: 1, 3; were all"):
        meet({0: OWN, 2: OWN}, 4)


def test_many_missing_are_cut_short() -> None:
    with pytest.raises(TuttiError, match=r"not come: 1, 2, 3, .* 16, …;"):
        meet({0: OWN}, 64)


def test_a_value_that_never_comes() -> None:
    store: Any = FakeStore()
    store.set("plan", "words")
    assert wait_for(store, "plan", 3) == "words"
    with pytest.raises(TuttiError, match="after 3 s rank 0 has not said its resume"):
        wait_for(store, "resume", 3)


def test_facts_tell_plans_apart() -> None:
    from dataclasses import replace

    from tests.support.any_plan import PLANS
    from tutti.document import Place, build
    from tutti.train.run.agreement import job_facts
    from tutti.train.run.config import TrainConfig
    from tutti.train.run.planning import Job

    written = {"model": "gpt2", "data": {"train": [{"kind": "synthetic"}]}}
    plan = PLANS["pipelines that cut differently"]
    assert plan.cluster.cluster is not None
    job = Job(
        config=build(TrainConfig, written, Place("x")),
        plan=plan,
        spec=small_model(2, tied=True),
        cluster=plan.cluster.cluster,
    )
    own = job_facts(job)
    assert job_facts(job) == own
    other = replace(plan, job=replace(plan.job, sequence_length=2 * plan.job.sequence_length))
    changed = job_facts(replace(job, plan=other))
    assert {name for name in own if own[name] != changed[name]} == {"plan"}
    changed = job_facts(replace(job, config=replace(job.config, seed=3, steps=7)))
    assert {name for name in own if own[name] != changed[name]} == {"seed", "steps"}
