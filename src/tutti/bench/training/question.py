"""What is timed, and how: steps that follow each other as in training."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.accelerator import Accelerator
from tutti.accelerator.reference.optimizer import AdamSettings
from tutti.hardware.chip import Dtype
from tutti.hardware.library import shipped
from tutti.models import read_config
from tutti.models.flops import flops_per_token
from tutti.models.load import catalog_config, load_model
from tutti.models.spec import ModelSpec
from tutti.models.tuning import AdapterSpec, Base, Tuning
from tutti.plan.job import PRECISIONS
from tutti.plan.plan import Plan, Recompute
from tutti.ranks.single_rank import plan_alone
from tutti.train.graphs.captured_blocks import CaptureMode
from tutti.train.run.planning import tuned
from tutti.units import many

WARM_UP = 3
SETTINGS = AdamSettings(learning_rate=1e-4, weight_decay=0.1)
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedQuestion:
    """What is timed."""

    model: str
    device: str | None
    micro_batch: int
    sequence_length: int
    layers: int | None
    precision: str
    steps: int
    capture: CaptureMode = "auto"  # our blocks as graphs
    lora: int | None = None  # rank of adapters on every linear layer; the rest is frozen
    base: Base = "wide"  # how frozen weights are held
    recompute: bool = False  # blocks keep their inputs alone

    @property
    def title(self) -> str:
        """What a table says of itself."""
        layers = f", {many(self.layers, 'layer')}" if self.layers else ""
        adapters = f", LoRA of rank {self.lora}" if self.lora else ""
        base = f" on {self.base}" if self.base != "wide" else ""
        return (
            f"{self.model}{layers}{adapters}{base}, "
            f"{self.micro_batch} × {self.sequence_length} tokens, {self.precision}"
        )

    def config(self) -> dict[str, Any]:
        """Return the model's config.json."""
        config = dict(catalog_config(self.model))
        return config | ({"num_hidden_layers": self.layers} if self.layers else {})

    def spec(self) -> ModelSpec:
        """Return the model."""
        whole = self.layers is None
        spec = load_model(self.model) if whole else read_config(self.config(), self.model)
        if self.lora is None:
            return spec
        return tuned(spec, Tuning(adapter=AdapterSpec(rank=self.lora), base=self.base))

    def plan(self, spec: ModelSpec) -> Plan:
        """Return the plan of the one chip."""
        blocks = ((1, spec.head_unit),) if self.recompute else ()
        return plan_alone(
            spec,
            sequence_length=self.sequence_length,
            micro_batch=self.micro_batch,
            precision=PRECISIONS[self.precision],
            recompute=Recompute(full=blocks),
        )


def tokens_of(
    asked: SpeedQuestion, spec: ModelSpec, accelerator: Accelerator, index: int
) -> tuple[Tensor, Tensor]:
    """Return the tokens of a step, drawn by its number, and what comes after each."""
    generator = torch.Generator().manual_seed(index)
    size = (asked.micro_batch, asked.sequence_length + 1)
    tokens = torch.randint(spec.vocab, size, generator=generator).to(accelerator.device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def timed(
    who: str,
    asked: SpeedQuestion,
    spec: ModelSpec,
    accelerator: Accelerator,
    step: Callable[[int], float],
) -> dict[str, Any]:
    """Run steps that follow each other as in training; one lasts from one loss to the next.

    Nobody waits for the chip in between: it may still update weights when the next step begins.
    """
    ends, loss = [], 0.0
    for index in range(WARM_UP + asked.steps):
        loss = step(index)
        ends.append(time.perf_counter())
    accelerator.synchronize()
    seconds = [stop - start for start, stop in itertools.pairwise(ends[WARM_UP - 1 :])]
    median = statistics.median(seconds)
    tokens = asked.micro_batch * asked.sequence_length
    work = flops_per_token(spec, asked.sequence_length) * tokens
    peak = _peak_flops(accelerator, PRECISIONS[asked.precision].compute)
    return {
        "who": who,
        **dataclasses.asdict(asked),
        "step_s": median,
        "spread": (max(seconds) - min(seconds)) / median,
        "tokens_per_s": tokens / median,
        "mfu": None if peak is None else work / median / peak,
        "peak_bytes": accelerator.memory().peak,
        "loss": loss,
    }


def _peak_flops(accelerator: Accelerator, dtype: Dtype) -> float | None:
    """Return the catalog's dense peak of this chip, if it knows the chip."""
    chips = {chip.name: chip for chip in shipped().chips.values()}
    chip = chips.get(accelerator.chip)
    return None if chip is None else chip.peak_flops(dtype, fallback=True)


def failure(error: Exception) -> dict[str, str]:
    """Return the row of somebody who could not run, in a line."""
    if isinstance(error, torch.OutOfMemoryError):
        return {"failed": "out of memory"}
    return {"failed": (str(error).strip().splitlines() or [type(error).__name__])[0]}


def fused_adamw(trained: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's fused AdamW with the settings of all sides."""
    return torch.optim.AdamW(
        trained, lr=SETTINGS.learning_rate, betas=(SETTINGS.beta1, SETTINGS.beta2),
        eps=SETTINGS.eps, weight_decay=SETTINGS.weight_decay, fused=True,
    )  # fmt: skip
