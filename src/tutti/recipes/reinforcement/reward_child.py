"""The process in which rewards run: reads groups of answers, writes what functions say of them.

Messages are lines of JSON over two pipes that nothing else uses: what a function prints goes to the
rank's log. Whatever a function raises is told as one line.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import resource
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tutti.recipes.reinforcement.rewards import NoRewardError

Reward = Callable[[list[str], dict[str, Any]], Sequence[Any]]


def find_function(name: str) -> Reward:
    """Return what "module:function", "file.py:function" or "FOLDER:score" names."""
    place, _, function = name.rpartition(":")
    if Path(place).is_dir():
        from tutti.recipes.reinforcement.reward_model import SCORE, RewardModel

        if function != SCORE:
            raise NoRewardError(f"{place} is a folder; a reward model's is {place}:{SCORE}")
        return RewardModel(Path(place))
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise NoRewardError(f"{place}: no such file")
        spec = importlib.util.spec_from_file_location(f"tutti_reward_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(path.parent.resolve()))
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, "")
        module = importlib.import_module(place)
    attribute = getattr(module, function, None)
    if not callable(attribute):
        raise NoRewardError(f"{place} has no function '{function}'")
    made: Reward = attribute
    return made


def judged(function: Reward, name: str, answers: list[str], record: dict[str, Any]) -> list[float]:
    """Return a function's rewards; raise NoRewardError for what are none."""
    returned = function(list(answers), dict(record))
    given = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise NoRewardError(f"{name} gave {given!r:.40}; expected a list with a number per answer")
    values = list(given)
    if len(values) != len(answers):
        raise NoRewardError(f"{name} gave {len(values)} rewards for {len(answers)} answers")
    for value in values:
        if isinstance(value, bool | int | float):
            if value != value or value in (float("inf"), float("-inf")):
                raise NoRewardError(f"{name} gave {value}, which is no reward")
        else:
            raise NoRewardError(f"{name} gave {value!r:.40}; expected a number")
    return [float(value) for value in values]


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    said = lines[0] if lines else ""
    return said if isinstance(error, NoRewardError) else f"{type(error).__name__}: {said}"


def main(arguments: list[str]) -> int:
    """Answer groups until the pipe is closed."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    read, write = int(arguments[0]), int(arguments[1])
    names = arguments[2:]
    with os.fdopen(read, "r") as asked, os.fdopen(write, "w") as told:

        def tell(value: object) -> None:
            told.write(json.dumps(value) + "\n")
            told.flush()

        try:
            with contextlib.redirect_stdout(sys.stderr):
                functions = {name: find_function(name) for name in names}
        except BaseException as error:
            tell({"broken": _reason(error)})
            return 1
        tell({"ready": True})
        for line in asked:
            given = json.loads(line)
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    rewards = [
                        judged(function, name, given["answers"], given["record"])
                        for name, function in functions.items()
                    ]
            except BaseException as error:  # SystemExit, too: only its group is lost
                tell({"error": _reason(error)})
            else:
                tell({"rewards": rewards})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
