"""What a unit computes on one rank, operator by operator, with shapes to price it by.

`flops` counts matrix products only, as model FLOPs are defined (DESIGN.md §5): 2·m·n·k each, and
attention over min(sequence, window) positions without taking the causal half away. `traffic_bytes`
is what an operator that runs alone reads and writes. Backward is split into the input part (what
the earlier stage waits for) and the weight part (what a zero-bubble schedule may postpone).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tutti.errors import InputError

LOGIT_CHUNK_BYTES = 1 << 29  # of logits that tutti's own head holds at a time, in the model's dtype


class OperatorKind(StrEnum):
    """What an operator is, and so which of the cost model's curves prices it."""

    GEMM = "gemm"
    GROUPED_GEMM = "grouped_gemm"
    ATTENTION = "attention"
    NORM = "norm"
    ROTARY = "rotary"
    ACTIVATION = "activation"
    ELEMENTWISE = "elementwise"
    SOFTMAX = "softmax"
    ROUTING = "routing"
    PERMUTE = "permute"
    EMBEDDING = "embedding"
    CROSS_ENTROPY = "cross_entropy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One micro-batch of one replica, and how the replica shares it out over its ranks."""

    sequences: int = 1
    sequence_length: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int | None = None  # None: tp where all experts are here, 1 where they are spread
    sequence_parallel: bool = False
    fused_attention: bool = True  # FlashAttention; else scores are materialised
    fused_cross_entropy: bool = True  # backward needs no logits: forward made their gradients
    element_bytes: float = 2.0  # of activations and of weights in matrix products

    def __post_init__(self) -> None:
        sizes = (self.sequences, self.sequence_length, self.tp, self.cp, self.ep)
        for name, value in zip(
            ("sequences", "sequence_length", "tp", "cp", "ep"), sizes, strict=True
        ):
            if type(value) is not int or value < 1:
                raise InputError(f"workload: '{name}' is {value}; must be a whole number above 0")
        if self.expert_tp is not None and (self.expert_tp < 1 or self.tp % self.expert_tp):
            raise InputError(f"workload: 'expert_tp' is {self.expert_tp}; must divide tp={self.tp}")
        if not 0 < self.element_bytes <= 16:
            raise InputError(f"workload: 'element_bytes' is {self.element_bytes}; try 2")
        if self.sequence_length % self.cp:
            raise InputError(
                f"workload: cp={self.cp} does not divide the sequence of {self.sequence_length}"
            )
        if self.sequence_parallel and self.tokens % self.tp:
            raise InputError(
                f"workload: sequence parallelism over tp={self.tp} does not divide the "
                f"{self.tokens} tokens of a rank"
            )

    @property
    def tokens(self) -> int:
        """Tokens whose products with sliced weights a rank computes."""
        return self.sequences * self.sequence_length // self.cp

    @property
    def own_tokens(self) -> int:
        """Tokens whose norms and residuals a rank computes."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens

    @property
    def experts_tp(self) -> int:
        """How many ways each expert is sliced."""
        if self.expert_tp is not None:
            return self.expert_tp
        return self.tp if self.ep == 1 else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one pass of an operator does."""

    flops: float = 0.0
    traffic_bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            flops=self.flops + other.flops, traffic_bytes=self.traffic_bytes + other.traffic_bytes
        )


NO_WORK = Work()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A tensor that forward leaves behind for backward."""

    name: str
    bytes: float
    core_attention: bool = False  # selective recomputation makes it anew


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The attention of one rank: every query position over its context."""

    sequences: int
    query_length: int
    key_length: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    causal: bool = True

    @property
    def pairs(self) -> float:
        """Query-key pairs that the mask leaves, on average over context-parallel ranks."""
        length = self.key_length
        reach = length if self.window is None else min(self.window, length)
        whole = reach * (reach + 1) / 2 + (length - reach) * reach
        return self.sequences * whole * self.query_length / length


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator of one unit on one rank.

    A gemm is (m × k)·(k × n), `count` of them (batched where unfused attention is); a grouped gemm
    has m rows in all, spread over `count` experts. Others have `elements`.
    """

    name: str
    kind: OperatorKind
    forward: Work
    backward_input: Work = NO_WORK
    backward_weight: Work = NO_WORK
    m: int = 0
    n: int = 0
    k: int = 0
    count: int = 1
    attention: AttentionShape | None = None
    elements: float = 0.0
    weight_bytes: float = 0.0  # of the sliced weights it reads
    core_attention: bool = False  # runs again under selective recomputation
    kept: tuple[Kept, ...] = ()

    @property
    def backward(self) -> Work:
        """Both parts of the backward pass."""
        return self.backward_input + self.backward_weight
