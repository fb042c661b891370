"""Rewards: Python functions of the user, run in a process of their own with a limit of time.

What raises, hangs, dies or gives no number costs its group and nothing else: the process is ended
and started again. It is no jail: it keeps a job from an accident, not from code that means harm.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tutti.errors import InputError

START_S = 60.0  # to import what rewards import


class NoRewardError(ValueError):
    """What a function is, or returned, that cannot be used; its text says all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What rewards say of a group."""

    rewards: tuple[float, ...] = ()  # the sum over the functions, of each answer
    problem: str = ""  # why there are none


class RewardProcess:
    """The functions of a job, and the process that they run in."""

    def __init__(self, names: Sequence[str], *, time_limit_s: float) -> None:
        self.names, self.time_limit_s = tuple(names), time_limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._write = self._read = -1
        self._unread = b""

    def start(self) -> None:
        """Start the process; refuse functions that are not there."""
        given_read, own_write = os.pipe()
        own_read, given_write = os.pipe()
        command = [
            sys.executable, "-m", "tutti.recipes.reinforcement.reward_child",
            str(given_read), str(given_write), *self.names,
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, pass_fds=(given_read, given_write), stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip
        os.close(given_read)
        os.close(given_write)
        self._write, self._read, self._unread = own_write, own_read, b""
        said = self._answer(START_S)
        if said is None or "ready" not in said:
            self.close()
            reason = "they take longer than a minute to import" if said is None else said["broken"]
            raise InputError(f"rewards: {reason}; mend {', '.join(self.names)}")

    def judge(self, answers: Sequence[str], record: dict[str, Any]) -> Judged:
        """Return the rewards of a group of answers to one prompt."""
        if self._process is None:
            self.start()
        line = json.dumps({"answers": list(answers), "record": record}) + "\n"
        try:
            _write_all(self._write, line.encode())
            said = self._answer(self.time_limit_s)
        except OSError:
            said = {"error": "the process of the rewards ended"}
        if said is None:
            self.close()
            return Judged(problem=f"no answer within {self.time_limit_s:g} s")
        if "rewards" in said:
            sums = [sum(column) for column in zip(*said["rewards"], strict=True)]
            return Judged(rewards=tuple(sums))
        if self._process is not None and self._process.poll() is not None:
            self.close()
        return Judged(problem=str(said.get("error") or said.get("broken")))

    def _answer(self, limit_s: float) -> dict[str, Any] | None:
        """Return the next message; None where none comes in time."""
        deadline = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._read, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    return None
                block = os.read(self._read, 1 << 16)
                if not block:
                    self.close()
                    return {"error": "the process of the rewards ended", "broken": "it ended"}
                self._unread += block
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process and whatever it started."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for end in (self._write, self._read):
            os.close(end)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
