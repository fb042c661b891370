"""What a rank says when its hardware is not what was planned, or its memory is full."""

from __future__ import annotations

from torch import Tensor

from tutti.accelerator import Accelerator
from tutti.accelerator.arithmetic import Product, wrong_product
from tutti.errors import TuttiError
from tutti.hardware.chip import Chip
from tutti.nn.linear import Linear
from tutti.ranks.local_capacity import LEAST_MEMORY
from tutti.ranks.rank_places import Seat, class_of
from tutti.simulate.estimate import Estimate
from tutti.train.engine.engine import Engine
from tutti.units import bytes_text

Built = tuple[Engine, Estimate]


def hardware_differences(accelerator: Accelerator, chip: Chip) -> list[str]:
    """Return what the device at hand is not, though the plan expects it."""
    differences = []
    if accelerator.chip not in (chip.name, *chip.aliases):
        differences.append(f"the plan expects {chip.name}, this is {accelerator.chip}")
    total = accelerator.memory().total
    if total < LEAST_MEMORY * chip.memory_bytes:
        differences.append(
            f"the plan expects {bytes_text(chip.memory_bytes)} of memory, here are "
            f"{bytes_text(total)}"
        )
    return differences


def check_arithmetic(engine: Engine) -> None:
    """Refuse a device that multiplies wrongly: the products of the rank's own layers are tried."""
    seat, chip = engine.seat, engine.accelerator.chip
    tokens = seat.replica.sequences * engine.plan.job.sequence_length // seat.replica.cp
    layers = [m.weight for m in engine.model.modules() if isinstance(m, Linear)]
    products = [Product(tokens, w.shape[1], w.shape[0]) for w in layers]
    wrong = wrong_product(engine.accelerator, products, engine.dtype)
    if wrong:
        raise TuttiError(
            f"rank {seat.rank} ({seat.place.chip}): {chip} multiplies wrongly:"
            f" {wrong}; nothing was trained. Look at `tutti accelerator check`, and at what limits "
            "the device: under MPS some numbers of processors do this"
        )


def _size(tensors: list[Tensor | None]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def explain_memory(
    error: BaseException, seat: Seat, accelerator: Accelerator, built: Built | None
) -> str:
    """Return which stage was out of memory, what it held, and what the plan promised.

    `built` is the rank's engine with the prediction of its plan, as soon as there is one.
    """
    place = seat.place
    use = accelerator.memory()
    parts = [
        f"out of memory on {place.chip}, pipeline {place.pipeline} stage {place.stage}",
        f"{bytes_text(use.allocated)} of {bytes_text(use.total)} were in use",
    ]
    if built is not None:
        engine, predicted = built
        states = engine.parameters.all_states()
        parameters = _size(list(engine.model.parameters()))
        optimizer = _size([t for s in states for t in s.optimizer.tensors().values()])
        parts.append(f"parameters {bytes_text(parameters)}, optimizer {bytes_text(optimizer)}")
        promised = predicted.memory[class_of(engine.schedule, seat)]
        parts.append(
            f"the plan promised {bytes_text(promised.total)} "
            f"(parameters {bytes_text(promised.parameters)}, gradients "
            f"{bytes_text(promised.gradients)}, optimizer {bytes_text(promised.optimizer)}, "
            f"activations {bytes_text(promised.moving)})"
        )
    first = str(error).splitlines()[0] if str(error) else ""
    return "; ".join(parts) + (f"; {first}" if first else "")
