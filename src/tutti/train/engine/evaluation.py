"""A loss without training: the forward half of a step, on one rank of any plan.

The last instruction of a forward half is the reduction of scalars that ends a step; its caller does
that one, for only it knows what was counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tutti.ranks.links import DONE, Handle
from tutti.schedule.forward import forward_list
from tutti.schedule.instruction import Instruction, Op
from tutti.train.engine.step_totals import StepSums

Handler = Callable[[Instruction], Handle]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """What a model makes of some tokens, the same on every rank."""

    loss: float  # mean over the tokens, or over examples
    balance: float
    tokens: int
    count: int  # by which the sums were divided
    margin: float = 0.0
    right: float = 0.0

    @classmethod
    def of(cls, sums: StepSums) -> EvaluationResult:
        """Return the means of sums over all ranks."""
        count = max(sums.count, 1.0)
        return cls(
            loss=sums.loss / count,
            balance=sums.balance / count,
            tokens=int(sums.tokens),
            count=int(sums.count),
            margin=sums.margin / count,
            right=sums.right / count,
        )


class Evaluation:
    """The forward half of a list, with what runs each instruction."""

    def __init__(
        self,
        instructions: Sequence[Instruction],
        handlers: Mapping[Op, Handler],
        start: Callable[[Instruction, Handler], Handle],
    ) -> None:
        self._instructions = [e for e in forward_list(instructions) if e.op is not Op.CLIP_NORM]
        self._handlers, self._start = handlers, start

    def run(self) -> None:
        """Run it to the end."""
        handles: list[Handle] = []
        for entry in self._instructions:
            for earlier in entry.after:
                self._wait(handles, earlier)
            handles.append(self._start(entry, self._handlers[entry.op]))
        for index in range(len(handles)):
            self._wait(handles, index)

    @staticmethod
    def _wait(handles: list[Handle], index: int) -> None:
        handles[index].wait()
        handles[index] = DONE  # a handle is waited for once
