"""What a rank says when something is wrong: hardware, memory, numbers that are not finite."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tutti.accelerator import Accelerator
from tutti.accelerator.arithmetic import Product, wrong_product
from tutti.errors import TuttiError
from tutti.hardware.chip import Chip
from tutti.nn.linear import Linear
from tutti.train.seats import class_of
from tutti.train.state import SpanState
from tutti.units import bytes_text

if TYPE_CHECKING:
    from tutti.train.run.worker import Worker

LEAST_MEMORY = 0.9  # of what the plan expects; drivers keep some


def hardware_differences(accelerator: Accelerator, chip: Chip) -> list[str]:
    """Return what the device at hand is not, though the plan expects it."""
    found = []
    if accelerator.chip not in (chip.name, *chip.aliases):
        found.append(f"the plan expects {chip.name}, this is {accelerator.chip}")
    total = accelerator.memory().total
    if total < LEAST_MEMORY * chip.memory_bytes:
        found.append(
            f"the plan expects {bytes_text(chip.memory_bytes)} of memory, here are "
            f"{bytes_text(total)}"
        )
    return found


def check_arithmetic(worker: Worker) -> None:
    """Refuse a device that multiplies wrongly: the products of the rank's own layers are tried."""
    replica = worker.seat.replica
    tokens = replica.sequences * worker.plan.job.sequence_length // replica.cp
    layers = [m.weight for m in worker.engine.model.modules() if isinstance(m, Linear)]
    products = [Product(tokens, w.shape[1], w.shape[0]) for w in layers]
    wrong = wrong_product(worker.accelerator, products, worker.engine.dtype)
    if wrong:
        raise TuttiError(
            f"rank {worker.rank} ({worker.position}): {worker.accelerator.chip} multiplies wrongly:"
            f" {wrong}; nothing was trained. Look at `tutti accelerator check`, and at what limits "
            "the device: under MPS some numbers of processors do this"
        )


def _size(tensors: list[Tensor | None]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def explain_memory(worker: Worker, error: BaseException) -> str:
    """Return which stage was out of memory, what it held, and what the plan promised."""
    place = worker.engine.seat.place if hasattr(worker, "engine") else None
    where = "" if place is None else f", pipeline {place.pipeline} stage {place.stage}"
    use = worker.accelerator.memory()
    parts = [
        f"out of memory on {worker.position}{where}",
        f"{bytes_text(use.allocated)} of {bytes_text(use.total)} were in use",
    ]
    if place is not None:
        states = worker.engine.parameters.all_states()
        parameters = _size(list(worker.engine.model.parameters()))
        optimizer = _size([t for s in states for t in s.optimizer.tensors().values()])
        parts.append(f"parameters {bytes_text(parameters)}, optimizer {bytes_text(optimizer)}")
        promised = worker.predicted.memory[class_of(worker.engine.schedule, worker.seat)]
        parts.append(
            f"the plan promised {bytes_text(promised.total)} "
            f"(parameters {bytes_text(promised.parameters)}, gradients "
            f"{bytes_text(promised.gradients)}, optimizer {bytes_text(promised.optimizer)}, "
            f"activations {bytes_text(promised.moving)})"
        )
    first = str(error).splitlines()[0] if str(error) else ""
    return "; ".join(parts) + (f"; {first}" if first else "")


# --- numbers that are not finite -----------------------------------------------------------------


def find_culprit(worker: Worker, step: int) -> str:
    """Return where the numbers of a step stopped being finite.

    The step changed nothing, so it is run once more with every module watched. All ranks do so.
    """
    engine = worker.engine
    own: tuple[int, int, str] | None = None
    broken = _broken_weights(engine.model)
    if broken:
        own = (0, _unit(broken), f"the weights of {broken} were not finite before the step")
    else:
        own = _watched(worker, step)
    found = worker.saving.gather(own)
    text = None
    if found is not None:
        known = sorted(f for f in found if f is not None)
        text = known[0][2] if known else "no single module shows it when the step is repeated"
    text = worker.saving.broadcast(text)
    return f"step {step + 1}: loss or gradients are not finite; {text}"


def _unit(name: str) -> int:
    digits = [part for part in name.split(".") if part.isdigit()]
    return int(digits[0]) if digits else 0


def _broken_weights(model: nn.Module) -> str:
    for name, parameter in model.named_parameters():
        if parameter.untyped_storage().size() and not bool(torch.isfinite(parameter).all()):
            return name.removeprefix("units.")
    return ""


def _watched(worker: Worker, step: int) -> tuple[int, int, str] | None:
    engine = worker.engine
    seen: list[str] = []
    hooks = [
        module.register_forward_hook(_watch(name.removeprefix("units."), seen))
        for name, module in engine.model.named_modules()
        if not any(True for _ in module.children())
    ]
    gradients: list[tuple[int, str]] = []
    close = engine.parameters.close

    def closing() -> None:
        close()
        gradients.extend(_broken_gradients(engine.parameters.all_states()))

    engine.parameters.close = closing  # type: ignore[method-assign]
    try:
        graphs = nullcontext() if engine.graphs is None else engine.graphs.suspended()
        with worker.feeder(worker.data.train, step, step + 1) as feeder, graphs:
            engine.step(feeder.step(step), worker.settings(0.0))
    finally:
        engine.parameters.close = close  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()
    where = f"rank {worker.rank} ({worker.position})"
    if seen:
        return (1, _unit(seen[0]), f"first in forward: module {seen[0]} on {where}")
    if gradients:
        unit, name = max(gradients)
        return (2, -unit, f"first in backward: the gradient of {name} on {where}")
    return None


def _watch(name: str, seen: list[str]) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        del module
        if seen or not isinstance(output, (Tensor, tuple)):
            return
        tensors = [output] if isinstance(output, Tensor) else list(output)
        if all(_finite(t) for t in tensors):
            return
        if all(_finite(t) for t in inputs):
            seen.append(name)

    return hook


def _finite(value: Any) -> bool:
    return (
        not isinstance(value, Tensor)
        or not value.is_floating_point()
        or bool(torch.isfinite(value).all())
    )


def _broken_gradients(states: list[SpanState]) -> list[tuple[int, str]]:
    found = []
    for state in states:
        for block, part in state.gradient_parts():
            if not bool(torch.isfinite(part).all()):
                found.append((block.unit, f"{block.unit}.{block.name}"))
    return found
