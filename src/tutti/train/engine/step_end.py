"""How far a step has come that may be cut off: whether it can still be finished, and by whom.

The sums of ClipNorm are the last thing that a step needs of other ranks. Before them nothing of the
state has changed; from them on a rank finishes alone. A rank that gave its part and lost the others
before it heard the sums does not know which: if any other heard them, it finishes with theirs.
Optimizers that see whole tensors ask the others once more, for where the step leads. A rank that
loses them before it knows is where it was before the step, whatever the others came to.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tutti.observe.pulse import Activity, Pulse
from tutti.schedule.instruction import Instruction, Op


class StepEnd:
    """The end of the step at hand."""

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self._norm = next(
            (i for i, entry in enumerate(instructions) if entry.op is Op.CLIP_NORM), -1
        )
        self.at: int | None = None  # the instruction at hand; None between steps
        self.pending = False  # this rank gave its part of the sums, and has not heard them
        self.pulse: Pulse | None = None  # where others see what this rank is doing
        self._scalars: Tensor | None = None
        self._last: Tensor | None = None  # of the step before

    def begin(self) -> None:
        """A step begins."""
        self.at, self.pending, self._scalars = 0, False, None

    def reach(self, index: int) -> None:
        """An instruction is begun."""
        self.at = index
        if self.pulse is not None:
            self.pulse.at(index)

    def waits(self, index: int) -> None:
        """An instruction that was begun is waited for."""
        if self.pulse is not None:
            self.pulse.at(index, Activity.WAITING)

    def between(self, step: int | None = None) -> None:
        """The rank is between two steps; with a number, before that one."""
        if self.pulse is not None and step is not None:
            self.pulse.step(step)
        elif self.pulse is not None:
            self.pulse.at(-1, Activity.BETWEEN)

    def settled(self, scalars: Tensor) -> None:
        """Nothing is needed of other ranks any more; these are the sums that all know."""
        self.pending, self._scalars = False, scalars
        if self.at is not None and self.at <= self._norm:
            self.at = self._norm + 1  # where whoever finishes it begins

    def over(self) -> None:
        """The step is in the state."""
        self.at, self._last = None, self._scalars

    @property
    def decided(self) -> bool:
        """Whether the step at hand only needs this rank's own work."""
        return self.at is not None and self._scalars is not None

    def sums(self) -> list[float]:
        """Return the sums of the last step that is in the state, for those who lack them."""
        return [] if self._last is None else [float(value) for value in self._last.tolist()]
