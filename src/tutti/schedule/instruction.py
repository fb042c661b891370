"""The closed instruction set that the engine executes and the simulator prices.

An instruction names an operation, the units it touches, the micro-batch, what is moved, and the
earlier instructions of the same list that it waits for. Lanes (compute, copy, and on the network
one first-in-first-out channel per boundary and direction plus one each for collectives inside a
pipeline and across pipelines) each run their instructions in list order; different lanes overlap.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Op(StrEnum):
    """Everything with a cost that a rank does in a step."""

    FORWARD = "Forward"
    RECOMPUTE = "Recompute"
    BACKWARD_INPUT = "BackwardInput"
    BACKWARD_WEIGHT = "BackwardWeight"
    SEND = "Send"
    RECEIVE = "Receive"
    GATHER_PARAMETERS = "GatherParameters"
    REDUCE_GRADIENTS = "ReduceGradients"
    FETCH = "Fetch"
    OFFLOAD = "Offload"
    SYNC_TIED = "SyncTied"
    CLIP_NORM = "ClipNorm"
    STEP = "Step"


class Lane(StrEnum):
    """What runs in order; instructions on different lanes may overlap."""

    COMPUTE = "compute"
    NETWORK = "network"
    COPY = "copy"


LANES: dict[Op, Lane] = {
    Op.FORWARD: Lane.COMPUTE,
    Op.RECOMPUTE: Lane.COMPUTE,
    Op.BACKWARD_INPUT: Lane.COMPUTE,
    Op.BACKWARD_WEIGHT: Lane.COMPUTE,
    Op.STEP: Lane.COMPUTE,
    Op.SEND: Lane.NETWORK,
    Op.RECEIVE: Lane.NETWORK,
    Op.GATHER_PARAMETERS: Lane.NETWORK,
    Op.REDUCE_GRADIENTS: Lane.NETWORK,
    Op.SYNC_TIED: Lane.NETWORK,
    Op.CLIP_NORM: Lane.NETWORK,
    Op.FETCH: Lane.COPY,
    Op.OFFLOAD: Lane.COPY,
}

COLLECTIVES = frozenset({Op.GATHER_PARAMETERS, Op.REDUCE_GRADIENTS, Op.SYNC_TIED, Op.CLIP_NORM})


class What(StrEnum):
    """What an instruction moves."""

    NOTHING = ""
    BATCH = "batch"
    ACTIVATIONS = "activations"
    GRADIENTS = "gradients"
    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer"
    DENSE = "dense"  # the parameters that every replica holds
    EXPERT = "expert"  # the parameters that an expert group shares out


class Scope(StrEnum):
    """Among whom a collective runs: the holders in one pipeline, or in all."""

    ALL = "all"
    PIPELINE = "pipeline"


NO_MICRO_BATCH = -1


class Instruction(NamedTuple):
    """One entry of a rank's list.

    `start`…`stop` are the half-open units; for Send and Receive both are the unit *entered*
    (activations) or *left backwards* (gradients) at the boundary. `after` holds indices of
    earlier instructions of the same list.
    """

    op: Op
    micro_batch: int = NO_MICRO_BATCH
    start: int = 0
    stop: int = 0
    what: What = What.NOTHING
    scope: Scope = Scope.ALL
    after: tuple[int, ...] = ()

    @property
    def lane(self) -> Lane:
        """The lane that runs it."""
        return LANES[self.op]

    @property
    def key(self) -> tuple[Op, int, int, int, What, Scope]:
        """What makes it the same instruction on another rank."""
        return (self.op, self.micro_batch, self.start, self.stop, self.what, self.scope)

    def __str__(self) -> str:
        words = [self.op.value]
        if self.what:
            words.append(self.what.value)
        if self.op in (Op.SEND, Op.RECEIVE):
            words.append(f"at unit {self.start}")
        elif self.stop > self.start:
            words.append(f"units {self.start}-{self.stop - 1}")
        if self.micro_batch != NO_MICRO_BATCH:
            words.append(f"micro-batch {self.micro_batch}")
        return " ".join(words)
