"""How answers are sampled and rewarded that a model then learns from. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tutti.document import Above, AtLeast, Count, Natural, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Groups of answers to prompts, and what judges them.

    A reward is a Python function, "module:function" or "file.py:function", or a reward model,
    "FOLDER:score"; the rewards of an answer are added up.
    """

    rewards: tuple[str, ...]
    group: Annotated[int, AtLeast(2)] = 8  # answers to each prompt
    prompts: Count | None = None  # of a batch; default: as many as surely fit its rows
    max_tokens: Count = 128  # of an answer
    temperature: Annotated[float, Above(0)] = 1.0
    updates: Count = 1  # steps that learn from one batch
    clip: Annotated[float, Above(0)] = 0.2  # how far probabilities may move in them
    clip_high: Annotated[float, Above(0)] | None = None  # upwards; default: as far
    normalise: bool = True  # GRPO: advantages are divided by their group's deviation
    time_limit_s: Annotated[Seconds, Above(0)] = 10.0  # for the rewards of one group
    bad_rewards: Literal["leave_out", "error"] = "leave_out"  # a group whose reward fails
    most_bad: Natural = 100  # groups left out, then the run ends
    answering: tuple[str, ...] = ()  # pools that only answer, one batch ahead; none: all take turns

    def __post_init__(self) -> None:
        if not self.rewards:
            raise ValueError("'rewards' is empty; name functions, as in [rewards.py:is_json]")
        if self.answering and self.temperature != 1.0:
            raise ValueError(
                f"'temperature' is {self.temperature:g}, but chips that answer ahead tell "
                "probabilities at 1; leave one of 'temperature' and 'answering' out"
            )
        for name in self.rewards:
            file, colon, function = name.rpartition(":")
            if not (file and colon and function.isidentifier()):
                raise ValueError(
                    f"reward '{name}': write module:function or file.py:function, as in "
                    "rewards.py:is_json"
                )

    @property
    def highest(self) -> float:
        """How far probabilities may rise."""
        return self.clip if self.clip_high is None else self.clip_high
