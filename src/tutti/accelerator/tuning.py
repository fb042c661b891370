"""Measures which implementation of each operator is fastest here, for a table of `Choices`.

Every implementation that takes a call runs it forward and backward, in turns with the others, on
the shapes and by the clock of `tutti profile`: the device's time, for training keeps its queue
full. One that is far behind after its first call is not timed further. What is fastest over the
shapes of a size class is the choice for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from time import perf_counter as _now
from types import MappingProxyType
from typing import Any

import torch

from tutti.accelerator.accelerator import Accelerator
from tutti.accelerator.choices import Choice, Size, size_of
from tutti.accelerator.operator_bench import both_ways
from tutti.accelerator.operators import Operators
from tutti.accelerator.profiling.cases import ProfileCase, prepare
from tutti.accelerator.profiling.grid import default_cases, model_cases
from tutti.accelerator.profiling.timer import Samples, Timer, describe, timer_for
from tutti.accelerator.profiling.workspace import TORCH_DTYPES, Workspace
from tutti.accelerator.registry import implementations, operator_names, usual
from tutti.accelerator.timing import seconds_of
from tutti.cost.measured.forms import NARROW
from tutti.errors import InputError, hint
from tutti.hardware.chip import Dtype
from tutti.models.load import load_model

HOPELESS = 5.0  # times the best first call; not timed further
ROUNDS = 9
TIE = 1.05  # times the best; as good as equal
SEQUENCE_LENGTH = 4096
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to measure."""

    model: str | None = None  # None: a grid of shapes
    tokens: tuple[int, ...] = (8192,)
    dtypes: tuple[str, ...] = ("bf16",)

    def __post_init__(self) -> None:
        for name in self.dtypes:
            if name not in {str(dtype) for dtype in TORCH_DTYPES}:
                raise InputError(f"--dtype: '{name}'; {hint(name, map(str, TORCH_DTYPES))}")

    def cases(self) -> list[ProfileCase]:
        """Return the calls, the most telling first."""
        if self.model is None:
            cases = default_cases()
        else:
            cases = model_cases(load_model(self.model), self.tokens, SEQUENCE_LENGTH, degrees=(1,))
        # products of 8 bits have one kernel, or none
        known = set(operator_names()) - set(NARROW.values())
        return [case for case in cases if case.operator in known]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One call through all implementations that take it."""

    operator: str
    shape: tuple[int, ...]
    size: Size
    seconds: dict[str, float]  # forward and backward, by implementation

    @property
    def dtype(self) -> str:
        """The dtype that the choice goes by."""
        return self.size.dtype

    @property
    def ranked(self) -> list[tuple[str, float]]:
        """Implementations and their seconds, the fastest first."""
        return sorted(self.seconds.items(), key=lambda item: item[1])

    def plain(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "operator": self.operator,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "size_class": self.size.size_class,
            "seconds": self.seconds,
        }


class _Watched(Operators):
    """Operators through one implementation, which note the last call."""

    args: tuple[Any, ...] = ()
    options: Mapping[str, Any] = MappingProxyType({})

    def _run(self, operator: str, *args: Any, **options: Any) -> Any:
        self.args, self.options = args, options
        return super()._run(operator, *args, **options)

    def whole(self, function: Callable[..., Any]) -> Callable[[], Any]:
        """Return the last call through a function, forward and backward."""
        options = {key: None if key == "later" else value for key, value in self.options.items()}
        leaves = tuple(
            tensor
            for tensor in (*self.args, *options.values())
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad
        )

        def call() -> Any:
            return function(*self.args, **options)

        return both_ways(call, leaves) if leaves else call


def measure(
    accelerator: Accelerator,
    question: Question,
    *,
    budget_s: float,
    progress: Progress | None = None,
) -> list[Measured]:
    """Measure operators of several implementations until all is done or the time is up.

    Every operator is measured on one call at least, however slow the machine is.
    """
    started = _now()
    kind = accelerator.device.type
    contested = {  # what is for inference only has no backward pass to time
        name for name in operator_names() if sum(i.exact for i in implementations(name, kind)) > 1
    }
    cases = [case for case in question.cases() if case.operator in contested]
    timer = timer_for(accelerator)
    rows: list[Measured] = []
    firsts = list({case.operator: case for case in reversed(cases)}.values())[::-1]
    ordered = firsts + [case for case in cases if case not in firsts]
    jobs = [(dtype, case) for case in ordered for dtype in question.dtypes]
    needed = len(firsts) * len(question.dtypes)
    spaces = {name: Workspace(accelerator, Dtype(name)) for name in question.dtypes}
    for number, (dtype, case) in enumerate(jobs):
        if number >= needed and _now() - started > budget_s:
            break
        if progress is not None:
            progress(f"{case} {dtype}", number, len(jobs))
        row = _measured(accelerator, case, spaces[dtype], timer)
        if row is not None:
            rows.append(row)
    return rows


def _measured(
    accelerator: Accelerator, case: ProfileCase, space: Workspace, timer: Timer
) -> Measured | None:
    """Return the times of one call; None where fewer than two implementations take it."""
    kind = accelerator.device.type
    calls: dict[str, Callable[[], Any]] = {}
    size: Size | None = None
    first_s: dict[str, float] = {}
    for implementation in usual(case.operator, kind):
        operators = _Watched(kind, forced={case.operator: implementation.name})
        try:
            prepare(case, space, operators).runs["forward"]()  # makes the call that is watched
            whole = operators.whole(implementation.function)
            whole()
            first_s[implementation.name] = seconds_of(accelerator, whole)
        except (InputError, torch.OutOfMemoryError):
            continue  # it does not take this call, or there is no room for it
        calls[implementation.name], size = whole, size_of(operators.args)
    if len(calls) < 2 or size is None:
        return None
    best = min(first_s.values())
    timed = {name: call for name, call in calls.items() if first_s[name] <= HOPELESS * best}
    samples = {name: Samples() for name in timed}
    for _ in range(ROUNDS):  # in turns, so that a noisy moment falls on all of them
        for name, call in timed.items():
            timer.sample(call, timer.calls_for(first_s[name]), samples[name])
    seconds = {**first_s, **{name: each.median for name, each in samples.items()}}
    return Measured(operator=case.operator, shape=case.shape, size=size, seconds=seconds)


def ranks(accelerator: Accelerator) -> dict[tuple[str, str], int]:
    """Return the rank of every implementation of a device, by operator and name."""
    kind = accelerator.device.type
    return {
        (operator, implementation.name): implementation.rank
        for operator in operator_names()
        for implementation in implementations(operator, kind)
    }


def fastest(
    rows: Sequence[Measured], ranks: Mapping[tuple[str, str], int] | None = None
) -> list[Choice]:
    """Return the choice per operator, dtype and size class: least mean ratio to the best.

    Of those that are as good as equal, the one of the highest rank: what was measured was one kind
    of call, and its author knows the others.
    """
    groups: dict[tuple[str, Size], list[Measured]] = {}
    for row in rows:
        groups.setdefault((row.operator, row.size), []).append(row)
    return [
        _choice(operator, size, own, ranks or {})
        for (operator, size), own in sorted(groups.items(), key=_order)
    ]


def _order(item: tuple[tuple[str, Size], list[Measured]]) -> tuple[str, str, int]:
    (operator, size), _ = item
    return operator, size.dtype, size.size_class


def _choice(
    operator: str, size: Size, rows: Sequence[Measured], ranks: Mapping[tuple[str, str], int]
) -> Choice:
    shared = set.intersection(*(set(row.seconds) for row in rows))

    def slowness(name: str) -> float:
        """The geometric mean of an implementation's time over the best one's."""
        ratios = [row.seconds[name] / min(row.seconds.values()) for row in rows]
        return math.exp(sum(map(math.log, ratios)) / len(ratios))

    least = min(map(slowness, shared))
    equal = [name for name in sorted(shared) if slowness(name) <= TIE * least]
    best = min(equal, key=lambda name: (-ranks.get((operator, name), 0), slowness(name)))
    speedup = slowness("reference") / slowness(best) if "reference" in shared else None
    return Choice(
        operator=operator,
        dtype=size.dtype,
        size_class=size.size_class,
        implementation=best,
        speedup=None if speedup is None else round(speedup, 3),
    )


def origin(accelerator: Accelerator, question: Question) -> str:
    """Say where a table comes from."""
    shapes = question.model or "a grid of shapes"
    day = datetime.now(UTC).date().isoformat()
    return f"measured on {accelerator.chip}, {shapes}, {describe(accelerator)}, {day}"
