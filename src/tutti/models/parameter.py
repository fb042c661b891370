"""One parameter tensor: shape, class, how it is sliced, and who has which part of its gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Interval = tuple[int, int]  # half-open

_NO_MATRICES = (  # linear, but moved by AdamW
    "logits", "score", "project_in", "project_out", "moe.router", "moe.shared_gate",
)  # fmt: skip


class ParameterClass(StrEnum):
    """Which group of ranks holds copies of it, and therefore reduces its gradient."""

    DENSE = "dense"
    EXPERT = "expert"


class ParameterKind(StrEnum):
    """What it is used for."""

    EMBEDDING = "embedding"
    LINEAR = "linear"
    BIAS = "bias"
    NORM = "norm"
    OTHER = "other"  # attention sinks, router corrections


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One tensor."""

    name: str
    shape: tuple[int, ...]
    kind: ParameterKind
    group: ParameterClass = ParameterClass.DENSE
    slice_dim: int | None = None  # the dimension tensor parallelism cuts; None: replicated
    slice_parts: int = 1  # into how many pieces it may be cut at most (heads, columns, …)
    matmul_uses: int = 0  # how often a token is multiplied with it; 0: no matrix product
    experts: int = 0  # dimension 0 is cut by expert parallelism
    experts_per_token: int = 0
    # a tensor that tensor-parallel ranks hold whole, though each makes a part of its gradient:
    # a norm of heads, the bias of sliced experts; a router only where experts are spread
    in_part: Literal["never", "spread", "always"] = "never"
    tied_to: str | None = None  # "unit.name" of the tensor it is a copy of
    trainable: bool = True
    frozen: bool = False  # a weight that this job does not train; not what nobody ever trains
    buffer: bool = False  # state that is saved but that nobody counts as a parameter

    @property
    def size(self) -> int:
        """How many numbers."""
        return math.prod(self.shape)

    @property
    def activated_size(self) -> int:
        """How many numbers one token uses."""
        return self.size // self.experts * self.experts_per_token if self.experts else self.size

    @property
    def decays(self) -> bool:
        """Whether weight decay is meant for it: for matrices, not for norms and biases."""
        return self.kind in (ParameterKind.EMBEDDING, ParameterKind.LINEAR)

    @property
    def is_matrix(self) -> bool:
        """Whether it is one or several matrices that Muon moves: a layer of a block."""
        layer = self.name.removesuffix(".weight")
        return (
            self.kind is ParameterKind.LINEAR
            and len(self.shape) >= 2
            and layer not in _NO_MATRICES
            and not self.name.startswith("prediction.")
        )

    @property
    def counted(self) -> bool:
        """Whether it is in the model's parameter count."""
        return self.tied_to is None and not self.buffer

    def is_partial(self, *, tp: int, sequence_parallel: bool, spread: bool) -> bool:
        """Tell whether ranks that hold the same slice each have a part of its gradient to add up.

        If not, each of them has all of it, of its own sequences. `spread`: experts are shared out
        whole, and each rank routes its own tokens.
        """
        if self.experts and spread:
            return True
        if tp == 1:
            return False
        if self.slice_dim is not None:
            return self.slice_parts < tp
        return sequence_parallel or self.in_part in (
            ("always", "spread") if spread else ("always",)
        )

    def part(
        self, *, tp: int = 1, rank: int = 0, experts: Interval | None = None
    ) -> tuple[Interval, ...]:
        """Return which part of the tensor a tensor-parallel rank holds, as intervals.

        `experts` are those of a rank where they are shared out whole, and not sliced.
        """
        intervals: list[Interval] = [(0, size) for size in self.shape]
        if self.experts and experts is not None:
            intervals[0] = experts
        elif self.slice_dim is not None and tp > 1:
            width = self.shape[self.slice_dim] // self.slice_parts
            first = self.slice_parts * rank // tp  # more ranks than parts: neighbours hold the same
            last = max(first + 1, self.slice_parts * (rank + 1) // tp)
            intervals[self.slice_dim] = (first * width, last * width)
        return tuple(intervals)

    def local_size(self, *, tp: int = 1, ep: int = 1, expert_tp: int = 1) -> int:
        """Return how many numbers one rank holds; what does not divide is padded or copied."""
        size, ways = self.size, expert_tp if self.experts else tp
        if self.slice_dim is not None and ways > 1:
            size = size // self.slice_parts * -(-self.slice_parts // ways)
        if self.experts and ep > 1:
            size = size // self.experts * -(-self.experts // ep)
        return size
