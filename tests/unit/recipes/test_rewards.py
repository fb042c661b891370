"""Rewards that raise, hang, end their process or give no numbers cost their group and no more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tutti.errors import InputError
from tutti.models.objective import Objective
from tutti.models.sampling import Sampling
from tutti.recipes.reinforcement.places import Load, bounds_of, share_out
from tutti.recipes.reinforcement.rewards import RewardProcess

FUNCTIONS = """
import os, time

def length(answers, record):
    print("noise on the terminal is no answer")
    return [len(text) for text in answers]

def odd(answers, record):
    what = record["what"]
    if what == "raises":
        raise KeyError("no such\\nfield")
    if what == "no value":
        raise ValueError("no such value")
    if what == "one number":
        return 0.5
    if what == "hangs":
        time.sleep(60)
    if what == "dies":
        os._exit(3)
    if what == "leaves":
        raise SystemExit(2)
    if what == "too few":
        return [1.0]
    if what == "text":
        return ["good"] * len(answers)
    if what == "nan":
        return [float("nan")] * len(answers)
    return [0.5] * len(answers)
"""


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardProcess]:
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(FUNCTIONS)
    made = RewardProcess([f"{path}:length", f"{path}:odd"], time_limit_s=1.5)
    made.start()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ("raises", "KeyError: 'no such"),
        ("no value", "ValueError: no such value"),
        ("one number", "gave 0.5; expected a list with a number per answer"),
        ("too few", "gave 1 rewards for 2 answers"),
        ("text", "gave 'good'; expected a number"),
        ("nan", "gave nan, which is no reward"),
        ("hangs", "no answer within 1.5 s"),
        ("dies", "the process of the rewards ended"),
        ("leaves", "SystemExit"),
    ],
)
def test_a_problem_is_one_line_and_the_next_group_is_judged(
    process: RewardProcess, what: str, problem: str
) -> None:
    found = process.judge(["a", "bcd"], {"what": what})
    assert problem in found.problem
    assert "\n" not in found.problem
    assert not found.rewards
    process.time_limit_s = 30.0  # a process that starts anew imports first
    assert process.judge(["a", "bcd"], {"what": "fine"}).rewards == (1.5, 3.5)
    process.time_limit_s = 1.5


def test_a_function_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"rewards: .*nothing.py: no such file; mend"):
        RewardProcess([f"{tmp_path}/nothing.py:a"], time_limit_s=1.0).start()
    with pytest.raises(InputError, match="json has no function 'sing'"):
        RewardProcess(["json:sing"], time_limit_s=1.0).start()


def test_what_an_objective_refuses() -> None:
    sampling = Sampling(rewards=("a.py:b",))
    with pytest.raises(ValueError, match="grpo learns from sampled answers; say how"):
        Objective(kind="grpo")
    with pytest.raises(ValueError, match="'sampling' is for grpo and rloo, not for dpo"):
        Objective(kind="dpo", sampling=sampling)
    with pytest.raises(ValueError, match="grpo with beta: 0 has no reference model"):
        Objective(kind="grpo", sampling=sampling, reference="there")
    with pytest.raises(ValueError, match=r"reward 'rewards.py': write module:function"):
        Sampling(rewards=("rewards.py",))


def test_prompts_are_shared_out_so_that_the_last_chip_is_done_soonest() -> None:
    speeds = {"new": 3.5, "old": 1.0}
    counts = share_out(8, ["new", "old", "old"], lambda pool, prompts: prompts / speeds[pool])
    assert counts == [6, 1, 1]
    assert bounds_of(counts) == [(0, 6), (6, 7), (7, 8)]
    assert Load(prompts=8, group=2, prompt_tokens=4, answer_tokens=4).group == 2
