"""The job of a Plan: what is computed, in which precision, under which kind of schedule."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from tutti.document import AtLeast, AtMost, Natural, Place, build_fields, plain_fields
from tutti.errors import hint
from tutti.hardware.chip import Dtype
from tutti.plan.serving import Service


class ScheduleKind(StrEnum):
    """How the stages of a pipeline order their micro-batches."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero_bubble"


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Which dtype each kind of number is held in.

    `master` is the optimizer's own copy of the parameters; None means that the parameters
    themselves are updated (pure bf16). A document may name one of the usual policies instead.
    """

    compute: Dtype = Dtype.BF16
    parameters: Dtype = Dtype.BF16
    gradients: Dtype = Dtype.FP32
    master: Dtype | None = Dtype.FP32
    moments: Dtype = Dtype.FP32
    loss_scaling: bool = False

    document_shape: ClassVar[tuple[type, ...]] = (str, dict)

    @classmethod
    def from_document(cls, value: object, place: Place) -> Precision:
        """Read a policy's name or its fields."""
        if isinstance(value, str):
            if value not in PRECISIONS:
                raise place.value_error(f"is '{value}'; {hint(value, PRECISIONS)}")
            return PRECISIONS[value]
        return build_fields(cls, value, place)

    def to_document(self) -> object:
        """Write the policy's name where it has one."""
        for name, precision in PRECISIONS.items():
            if self == precision:
                return name
        return plain_fields(self)

    @property
    def stream(self) -> Dtype:
        """What activations are held in: products of 8 bits are an inner matter of a layer."""
        return self.parameters if self.compute in (Dtype.FP8, Dtype.FP4) else self.compute

    @property
    def label(self) -> str:
        """The policy's name, or its compute dtype with a mark."""
        written = self.to_document()
        return written if isinstance(written, str) else f"{self.compute} (custom)"


PRECISIONS: dict[str, Precision] = {
    "bf16": Precision(),
    "fp16": Precision(compute=Dtype.FP16, parameters=Dtype.FP16, loss_scaling=True),
    "fp32": Precision(compute=Dtype.FP32, parameters=Dtype.FP32, master=None),
    "pure_bf16": Precision(gradients=Dtype.BF16, master=None, moments=Dtype.BF16),
    # products of blocks in 8 bits, everything else as in bf16 and pure_bf16
    "fp8": Precision(compute=Dtype.FP8),
    "pure_fp8": Precision(compute=Dtype.FP8, gradients=Dtype.BF16, master=None, moments=Dtype.BF16),
}


OptimizerName = Literal["adamw", "adamw8bit", "adafactor", "lion", "muon", "sgd"]
MOMENTS: dict[str, tuple[str, ...]] = {  # what each optimizer keeps of a parameter, in its size
    "adamw": ("mean", "square"), "adamw8bit": ("mean", "square"), "lion": ("mean",),
    "adafactor": (), "muon": ("mean", "square"), "sgd": (),
}  # fmt: skip
EIGHT_BIT = ("adamw8bit",)  # whose moments are codes of 8 bits
AVERAGE_BYTES = 4.0  # of the running mean of a parameter
CODE_BLOCK = 256  # elements that share a scale in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The training step that a Plan lays out, or what is `serving`.

    Then `sequence_length` is the longest sequence, and `global_batch` the slots of all engines.
    """

    sequence_length: Annotated[int, AtLeast(1), AtMost(2**28)]
    global_batch: Annotated[int, AtLeast(1), AtMost(2**40)]  # sequences per step, all pipelines
    precision: Precision = PRECISIONS["bf16"]
    optimizer: OptimizerName = "adamw"
    average: bool = False  # whether a running mean of the weights is kept, in float32
    schedule: ScheduleKind = ScheduleKind.ONE_F_ONE_B
    wide_units: tuple[tuple[Natural, Natural], ...] = ()  # half-open; see `narrow`
    serving: Service | None = None

    def narrow(self, unit: int) -> bool:
        """Tell whether a block's products are made in fewer bits than its numbers are held in.

        Of one block alike on all chips, so that which of them holds it changes nothing.
        """
        if self.precision.compute is not Dtype.FP8:
            return False
        return not any(start <= unit < stop for start, stop in self.wide_units)

    @property
    def tokens(self) -> int:
        """Tokens per optimizer step."""
        return self.sequence_length * self.global_batch

    @property
    def state_bytes(self) -> float:
        """What the optimizer keeps of each parameter that it updates: master copy and moments."""
        master = self.precision.master
        copy = master.num_bytes if master is not None else 0.0
        mean = AVERAGE_BYTES if self.average else 0.0
        return copy + mean + len(MOMENTS[self.optimizer]) * self.moment_bytes

    @property
    def update_bytes(self) -> float:
        """What updating one parameter reads and writes."""
        precision = self.precision
        weight = precision.parameters.num_bytes * (2 if precision.master is None else 1)
        gradient = precision.gradients.num_bytes
        if self.optimizer == "adafactor":  # squared twice, scaled to be measured, and to be taken
            gradient = 4.0 * gradient + 5.0 * 4.0
        return gradient + 2.0 * self.state_bytes + weight

    @property
    def moment_bytes(self) -> float:
        """What a moment of one parameter takes."""
        if self.optimizer in EIGHT_BIT:
            return 1.0 + 4.0 / CODE_BLOCK
        return float(self.precision.moments.num_bytes)

    @property
    def decoded_bytes(self) -> float:
        """What moments take of each parameter while the optimizer moves it, beside their codes."""
        return 4.0 * len(MOMENTS[self.optimizer]) if self.optimizer in EIGHT_BIT else 0.0
