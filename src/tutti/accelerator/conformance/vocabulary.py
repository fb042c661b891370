"""The head with its vocabulary cut among ranks: two threads stand in for two ranks.

Each thread runs the implementation on its rows of the weight; maxima and sums are joined as a
collective would join them. Together they must give what one rank with the whole weight gives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.accelerator.accelerator import Accelerator
from tutti.accelerator.conformance.call import Alone, UnsupportedError
from tutti.accelerator.conformance.case import Case, Integers, Values, drawn
from tutti.accelerator.conformance.compare import Distance, distance
from tutti.accelerator.conformance.report import Outcome, Verdict
from tutti.accelerator.reference.loss import linear_cross_entropy
from tutti.accelerator.registry import Implementation, implementations

OPERATOR = "linear_cross_entropy"
CUT = 40  # unequal parts: 40 and 57 of 97 tokens
WAIT_S = 60.0
CASE = Case(
    OPERATOR,
    "vocabulary cut in two",
    (
        Values((9, 32)),
        Values((97, 32), 32**-0.5),
        Integers((0, 39, 40, 96, -100, 5, 41, 80, 12)),
    ),
    {"soft_cap": 5.0},
    terms=97,
)


class Meeting:
    """Where two threads lay a tensor each on the table and both take the joined one."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2)
        self._table: list[Tensor | None] = [None, None]

    def join(self, rank: int, values: Tensor, how: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Replace the values of both threads by their combination."""
        self._table[rank] = values.clone()
        self._barrier.wait(WAIT_S)
        first, second = self._table
        assert first is not None
        assert second is not None
        values.copy_(how(first, second))
        self._barrier.wait(WAIT_S)

    def leave(self) -> None:
        """Let the other thread not wait for one that failed."""
        self._barrier.abort()


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of the vocabulary."""

    rank: int
    start: int
    meeting: Meeting

    def maximum(self, values: Tensor) -> None:
        """Replace the values by their maximum over the ranks."""
        self.meeting.join(self.rank, values, torch.maximum)

    def total(self, values: Tensor) -> None:
        """Replace the values by their sum over the ranks."""
        self.meeting.join(self.rank, values, torch.add)


def check(accelerator: Accelerator, dtypes: Sequence[torch.dtype]) -> Iterator[Outcome]:
    """Yield an outcome per implementation and dtype."""
    for implementation in implementations(OPERATOR, accelerator.device.type):
        for dtype in dtypes:
            verdict, detail, error = _verdict(accelerator, implementation, dtype)
            yield Outcome(
                subject=OPERATOR,
                check="backward",
                verdict=verdict,
                implementation=implementation.name,
                dtype=str(dtype).removeprefix("torch."),
                case=CASE.name,
                detail=detail,
                error=error,
            )


def _verdict(
    accelerator: Accelerator, implementation: Implementation, dtype: torch.dtype
) -> tuple[Verdict, str, float]:
    x, weight, targets = drawn(CASE, dtype)
    expected = _whole(x.double(), weight.double(), targets)
    try:
        outputs = _cut(accelerator, implementation, x, weight, targets)
    except UnsupportedError as reason:
        return Verdict.UNSUPPORTED, str(reason), 0.0
    except Exception as error:  # a vendor's kernel may fail in any way; each is an answer here
        return Verdict.FAILED, f"{type(error).__name__}: {error}".splitlines()[0], 0.0
    worst = max(
        (distance(name, outputs[name], expected[name], dtype, CASE.terms) for name in expected),
        key=lambda one: one.part,
        default=Distance(0.0),
    )
    return (Verdict.FAILED if worst.part > 1 else Verdict.PASSED), worst.detail, worst.part


def _whole(x: Tensor, weight: Tensor, targets: Tensor) -> dict[str, Tensor]:
    x, weight = x.requires_grad_(), weight.requires_grad_()
    total, losses = linear_cross_entropy(x, weight, targets, **CASE.options)
    total.backward()
    assert x.grad is not None
    assert weight.grad is not None
    return {
        "loss": total.detach(),
        "losses": losses,
        "gradient of x": x.grad,
        "gradient of weight": weight.grad,
    }


def _cut(
    accelerator: Accelerator,
    implementation: Implementation,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
) -> dict[str, Tensor]:
    """Return what two ranks give together: x's gradient is the sum of theirs."""
    meeting = Meeting()
    rows = (slice(0, CUT), slice(CUT, None))

    def rank(number: int) -> dict[str, Any]:
        try:
            own_x = accelerator.to_device(x).detach().requires_grad_()
            own_weight = accelerator.to_device(weight[rows[number]]).detach().requires_grad_()
            total, losses = Alone(accelerator.device.type, implementation).linear_cross_entropy(
                own_x,
                own_weight,
                accelerator.to_device(targets),
                vocabulary=Part(number, number * CUT, meeting),
                **CASE.options,
            )
            total.backward()
            accelerator.synchronize()
            return {"loss": total, "losses": losses, "x": own_x.grad, "weight": own_weight.grad}
        except BaseException:
            meeting.leave()
            raise

    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(rank, number) for number in (0, 1)]
    errors = [error for future in waiting if (error := future.exception()) is not None]
    if errors:  # the thread that was left waiting says nothing about why
        raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
    first, second = (future.result() for future in waiting)
    return {
        "loss": first["loss"],
        "losses": second["losses"],
        "gradient of x": first["x"].cpu().double() + second["x"].cpu().double(),
        "gradient of weight": torch.cat((first["weight"].cpu(), second["weight"].cpu())),
    }
