"""Runs a case once, forward and backward, through one implementation on one device."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tutti.accelerator.conformance.case import Case, Values, laid_out, leaves, replaced
from tutti.accelerator.conformance.compare import IN_8_BITS
from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.operators import Operators
from tutti.accelerator.paged_segments import PagedSegments
from tutti.accelerator.quantised import QuantisedWeight
from tutti.accelerator.reference.narrow import NarrowRows
from tutti.accelerator.registry import REFERENCES, Implementation


class UnsupportedError(Exception):
    """An implementation says that it does not take a call."""


class Alone(Operators):
    """The operators of a device, run by one implementation and no other."""

    def __init__(self, device_type: str, implementation: Implementation) -> None:
        super().__init__(device_type, forced={})
        self._implementation = implementation

    def _run(self, operator: str, *args: Any, **options: Any) -> Any:
        del operator
        reason = self._implementation.supports(*args, **options)
        if reason is not None:
            raise UnsupportedError(reason)
        return self._implementation.function(*args, **options)

    _run_fused = _run


@dataclass(slots=True)
class Results:
    """The tensors that a call gave, by name."""

    forward: dict[str, Tensor] = field(default_factory=dict)
    backward: dict[str, Tensor] = field(default_factory=dict)
    complaint: str = ""  # what is wrong beyond numbers

    def all(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield direction, name and tensor."""
        for direction, tensors in (("forward", self.forward), ("backward", self.backward)):
            for name, tensor in tensors.items():
                yield direction, name, tensor


def run_case(
    case: Case,
    operators: Operators,
    numbers: Sequence[Tensor],
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    backward: bool = True,
) -> Results:
    """Run a case on its numbers, in `dtype` if that is given, and return what came out."""
    specs = leaves((case.arguments, case.options))
    placed = [
        _placed(spec, number, device, dtype) for spec, number in zip(specs, numbers, strict=True)
    ]
    following = iter(placed)
    arguments, options = replaced((case.arguments, case.options), lambda _: next(following))
    arguments = tuple(
        value.to(device) if isinstance(value, PagedSegments | QuantisedWeight) else value
        for value in arguments
    )
    later = WeightGradients() if case.later else None
    if later is not None:
        options = {**options, "later": later}
    with torch.set_grad_enabled(backward):
        output = getattr(operators, case.operator)(*arguments, **options)
    names = tensor_names(case)
    if case.in_place:
        returned = {} if output is None else output_names(output)
        return Results(forward={**dict(zip(names, placed, strict=True)), **returned})
    results = Results(forward=output_names(output))
    if backward:
        begins = options.get("gradient_scale", 1.0) if options.get("starts_backward") else None
        inputs = dict(zip(names, placed, strict=True))
        _backward(results, inputs, later, begins, summed=case.summed)
    return results


def _placed(spec: Any, number: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    if not isinstance(spec, Values):
        return number.to(device)
    tensor = laid_out(number.to(device, dtype or number.dtype, copy=True), spec.layout)
    tensor = tensor.detach()
    return tensor.requires_grad_(spec.trained)


def _backward(
    results: Results,
    inputs: dict[str, Tensor],
    later: WeightGradients | None,
    begins: float | None,
    *,
    summed: bool,
) -> None:
    """Send gradients into every output that takes one: of unit variance, or what was promised."""
    outputs = [tensor for tensor in results.forward.values() if tensor.requires_grad]
    generator = torch.Generator().manual_seed(len(outputs))
    incoming = [
        torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        # rounded as the coarsest dtype would, so that every dtype and the reference get the same
        .to(torch.bfloat16)
        .to(tensor.device, tensor.dtype)
        for tensor in outputs
    ]
    if begins is not None:
        incoming = [torch.full_like(tensor, begins) for tensor in outputs]
    torch.autograd.backward(outputs, incoming)
    trained = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
    if later is not None:
        weight = "table" if "table" in trained else "weight"
        if trained[weight].grad is not None:  # that of a bias costs little and may come early
            results.complaint = "the weight's gradient was computed at once, not left for later"
        if summed:
            _sum_up(later)
        else:
            later.run()
    for name, tensor in trained.items():
        results.backward[f"gradient of {name}"] = (
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        )


@torch.no_grad()
def _sum_up(later: WeightGradients) -> None:
    """Let what was left for later go onto sums, which are the gradients then."""
    for deferred in later.take():
        weight = deferred.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        total = torch.zeros(weight.shape, dtype=wide, device=weight.device)
        deferred.onto(total)
        weight.grad = total.to(weight.dtype)


def tensor_names(case: Case) -> list[str]:
    """Return the name of every tensor of a call, as the operator's signature has it."""
    parameters = list(inspect.signature(REFERENCES[case.operator]).parameters)
    named = {**dict(zip(parameters, case.arguments, strict=False)), **case.options}
    names = []
    for name, value in named.items():
        own = leaves(value)
        single = isinstance(value, Values) or (len(own) == 1 and not isinstance(value, tuple))
        names += [name] if single else [f"{name}[{i}]" for i in range(len(own))]
    return names


def output_names(output: Any) -> dict[str, Tensor]:
    """Return an operator's results by name."""
    if isinstance(output, Tensor | NarrowRows):
        output = (output,)
        names = ["result"]
    else:
        names = getattr(output, "_fields", [f"result {i}" for i in range(len(output))])
    tensors: dict[str, Tensor] = {}
    for name, value in zip(names, output, strict=True):
        narrow = isinstance(value, NarrowRows)
        tensors[f"{name} {IN_8_BITS}" if narrow else name] = value.wide() if narrow else value
    return tensors
