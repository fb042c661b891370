"""What is measured: an operator on a shape; how to run each of its passes as the engine does.

In a model an operator's input was not used a moment ago, at least not all of it. So calls take
turns over as many copies of their tensors as it takes to leave the caches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.operators import Operators
from tutti.accelerator.profiling.timer import Run
from tutti.accelerator.profiling.workspace import Workspace
from tutti.accelerator.reference.optimizer import AdamSettings
from tutti.accelerator.segments import Segments
from tutti.cost.measured.forms import FORMS, SERVED, Direction
from tutti.models.parts import Activation, RouterSpec

EPS = 1e-5
MOST_COPIES = 8


@dataclass(frozen=True, slots=True)
class ProfileCase:
    """One operator on one shape."""

    operator: str
    shape: tuple[int, ...]
    serves: bool = False
    """As a server runs it: fixed weights, inside a graph where the chip has such."""

    @property
    def directions(self) -> tuple[Direction, ...]:
        """The passes that are measured."""
        return SERVED if self.serves else FORMS[self.operator].directions

    @property
    def flops(self) -> float:
        """Of its forward pass."""
        return float(FORMS[self.operator].flops(self.shape))

    @property
    def elements(self) -> float:
        """That its forward pass reads and writes."""
        return float(FORMS[self.operator].elements(self.shape))

    def __str__(self) -> str:
        return f"{self.operator} {'×'.join(map(str, self.shape))}{' served' * self.serves}"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A case with its tensors: one function per pass."""

    runs: dict[Direction, Run]
    kernel: str
    calls: int = 1  # of the operator, in one run


Maker = Callable[[tuple[int, ...], Workspace, Operators], Prepared]


def prepare(case: ProfileCase, workspace: Workspace, operators: Operators) -> Prepared:
    """Return how to run a case; successive calls take turns over copies of its tensors."""
    size = max(1.0, case.elements * workspace.element_bytes)
    if case.operator == "embedding":  # the table is large, whatever is read of it
        size = max(size, float(case.shape[1] * case.shape[2] * workspace.element_bytes))
    copies = max(1, min(MOST_COPIES, math.ceil(workspace.cache_bytes / size)))
    each = [_MAKERS[case.operator](case.shape, workspace, operators) for _ in range(copies)]
    runs: dict[Direction, Run] = {
        direction: in_turns([one.runs[direction] for one in each]) for direction in each[0].runs
    }
    return Prepared(runs, each[0].kernel)


def trained_maker(operator: str) -> Maker:
    """Return how an operator of training is made ready."""
    return _MAKERS[operator]


def in_turns(runs: Sequence[Run]) -> Run:
    """Return a run that is each of several, one after the other."""
    if len(runs) == 1:
        return runs[0]
    turns = itertools.cycle(runs)
    return lambda: next(turns)()


def _differentiable(
    space: Workspace,
    operators: Operators,
    name: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    **options: Any,
) -> Prepared:
    """Forward, and backward to every tensor that asks for its gradient."""
    inputs = [a for a in args if isinstance(a, Tensor) and a.requires_grad]

    def forward() -> Any:
        return function(*args, **options)

    outputs = forward()
    wanted = [
        t
        for t in (outputs if isinstance(outputs, tuple) else (outputs,))
        if isinstance(t, Tensor) and t.requires_grad
    ]
    gradients = [space.like(t) for t in wanted]

    def backward() -> Any:
        return torch.autograd.grad(wanted, inputs, gradients, retain_graph=True)

    return Prepared(
        {"forward": forward, "backward": backward}, _kernel(operators, name, args, options)
    )


def _kernel(operators: Operators, name: str, args: Sequence[Any], options: dict[str, Any]) -> str:
    return operators.chosen(name, *args, **options).name


# --- products --------------------------------------------------------------------------------


def _product(
    space: Workspace,
    operators: Operators,
    name: str,
    function: Callable[..., Tensor],
    x: Tensor,
    w: Tensor,
    *rest: Any,
) -> Prepared:
    later = WeightGradients()
    y = function(x, w, *rest, later=later)
    gradient = space.like(y)

    def of_input() -> Any:
        gradients = torch.autograd.grad(y, x, gradient, retain_graph=True)
        later.take()
        return gradients

    runs: dict[Direction, Run] = {
        "forward": lambda: function(x, w, *rest, later=later),
        "input_gradient": of_input,
        "weight_gradient": _onto_sum(y, x, gradient, later),
    }
    return Prepared(runs, _kernel(operators, name, (x, w, *rest), {}))


def _onto_sum(y: Tensor, x: Tensor, gradient: Tensor, later: WeightGradients) -> Run:
    """Return the weight's part of backward as most micro-batches run it: onto a wide sum."""
    torch.autograd.grad(y, x, gradient, retain_graph=True, allow_unused=True)
    deferred = later.take()
    sums = [torch.zeros_like(d.weight, dtype=torch.float32) for d in deferred]

    @torch.no_grad()
    def run() -> list[Tensor]:
        for each, total in zip(deferred, sums, strict=True):
            each.onto(total)
        return sums

    return run


def _linear(name: str) -> Maker:
    def make(shape: tuple[int, ...], space: Workspace, operators: Operators) -> Prepared:
        tokens, out, wide = shape
        x, w = space.take(tokens, wide), space.take(out, wide)
        return _product(space, operators, name, getattr(operators, name), x, w)

    return make


def _grouped_linear(name: str) -> Maker:
    def make(shape: tuple[int, ...], space: Workspace, operators: Operators) -> Prepared:
        rows, out, wide, experts = shape
        counts = torch.full((experts,), rows // experts, device=space.device)
        counts[: rows % experts] += 1
        x, w = space.take(rows, wide), space.take(experts, out, wide)
        return _product(space, operators, name, getattr(operators, name), x, w, counts)

    return make


def _linear_cross_entropy(
    shape: tuple[int, ...], space: Workspace, operators: Operators
) -> Prepared:
    tokens, vocabulary, wide = shape
    weight = space.take(vocabulary, wide)
    args = (space.take(tokens, wide), weight, space.numbers(vocabulary, tokens))
    options = {"starts_backward": True}
    gradient = space.like(weight)
    total = torch.zeros_like(weight, dtype=torch.float32, requires_grad=False)
    runs: dict[Direction, Run] = {
        "forward": lambda: operators.linear_cross_entropy(*args, starts_backward=True),
        "backward": lambda: total.add_(gradient),  # forward made it; it joins the others
    }
    return Prepared(runs, _kernel(operators, "linear_cross_entropy", args, options))


def _embedding(shape: tuple[int, ...], space: Workspace, operators: Operators) -> Prepared:
    tokens, width, vocabulary = shape
    args = (space.numbers(vocabulary, tokens), space.take(vocabulary, width))
    later = WeightGradients()
    y = operators.embedding(*args, later=later)
    runs: dict[Direction, Run] = {
        "forward": lambda: operators.embedding(*args, later=later),
        "backward": _onto_sum(y, args[1], space.like(y), later),
    }
    return Prepared(runs, _kernel(operators, "embedding", args, {}))


# --- attention -------------------------------------------------------------------------------


def _scored_attention(shape: tuple[int, ...], space: Workspace, operators: Operators) -> Prepared:
    return _attention(shape, space, operators, soft_cap=50.0)


def _sink_attention(shape: tuple[int, ...], space: Workspace, operators: Operators) -> Prepared:
    return _attention(shape, space, operators, sinks=space.take(shape[2]))


def _biased_attention(shape: tuple[int, ...], space: Workspace, operators: Operators) -> Prepared:
    sequences, length, heads, *_ = shape
    places = torch.arange(length, device=space.device, dtype=torch.float32).repeat(sequences)
    slopes = 2.0 ** torch.linspace(-1.0, -8.0, heads, device=space.device)
    return _attention(shape, space, operators, key_bias=slopes[:, None] * places)


def _attention(
    shape: tuple[int, ...], space: Workspace, operators: Operators, **options: Any
) -> Prepared:
    sequences, length, heads, kv_heads, head_dim, value_dim = shape
    tokens = sequences * length
    args = (
        space.take(tokens, heads, head_dim),
        space.take(tokens, kv_heads, head_dim),
        space.take(tokens, kv_heads, value_dim),
        Segments.batch(sequences, length),
    )
    return _differentiable(
        space, operators, "attention", operators.attention, args, scale=head_dim**-0.5, **options
    )


# --- rows and elements -----------------------------------------------------------------------


def _norm(name: str, *, added: bool, biased: bool) -> Maker:
    def make(shape: tuple[int, ...], space: Workspace, operators: Operators) -> Prepared:
        rows, width = shape
        args = [space.take(rows, width) for _ in range(2 if added else 1)]
        args += [space.take(width) for _ in range(2 if biased else 1)]
        return _differentiable(space, operators, name, getattr(operators, name), args, eps=EPS)

    return make


def _activation(shape: tuple[int, ...], space: Workspace, operators: Operators) -> Prepared:
    rows, width = shape
    args = (space.take(rows, width),)
    kind = Activation.GELU_TANH
    return _differentiable(space, operators, "activation", operators.activation, args, kind=kind)


def _gated_activation(shape: tuple[int, ...], space: Workspace, operators: Operators) -> Prepared:
    rows, width = shape
    args = (space.take(rows, 2 * width),)
    kind = Activation.SILU
    return _differentiable(
        space, operators, "gated_activation", operators.gated_activation, args, kind=kind
    )


def _rotary(shape: tuple[int, ...], space: Workspace, operators: Operators) -> Prepared:
    tokens, heads, dim = shape
    angles = torch.rand(tokens, dim // 2, device=space.device)
    args = (space.take(tokens, heads, dim), angles.cos(), angles.sin())
    return _differentiable(space, operators, "rotary", operators.rotary, args)


def _add(shape: tuple[int, ...], space: Workspace, operators: Operators) -> Prepared:
    del operators
    a, b = (space.take(*shape, gradient=False) for _ in range(2))
    return Prepared({"forward": lambda: a + b}, "torch")


def _copy(shape: tuple[int, ...], space: Workspace, operators: Operators) -> Prepared:
    del operators
    (traffic,) = shape  # read and written together
    source = torch.zeros(traffic // 2, dtype=torch.uint8, device=space.device)
    target = torch.empty_like(source)
    return Prepared({"forward": lambda: target.copy_(source)}, "torch")


def _adamw(shape: tuple[int, ...], space: Workspace, operators: Operators) -> Prepared:
    """Weights and gradients in the compute format, states in fp32: masters come with the plan."""
    (count,) = shape
    weight, gradient = (space.take(count, gradient=False) for _ in range(2))
    mean, square = (torch.zeros(count, device=space.device) for _ in range(2))
    args = ([weight.clone()], [gradient], [mean], [square])
    options = {"step": 10, "settings": AdamSettings(learning_rate=1e-9)}
    return Prepared(
        {"forward": lambda: operators.adamw(*args, **options)},  # type: ignore[arg-type]
        _kernel(operators, "adamw", args, options),
    )


# --- experts ---------------------------------------------------------------------------------


def _chosen(space: Workspace, tokens: int, top: int, experts: int) -> Tensor:
    """Different experts for every token, in balance."""
    first = torch.arange(tokens, device=space.device).unsqueeze(1) * top
    return (first + torch.arange(top, device=space.device)) % experts


def _route(shape: tuple[int, ...], space: Workspace, operators: Operators) -> Prepared:
    tokens, experts, top = shape
    args = (space.take(tokens, experts), RouterSpec(), top)
    return _differentiable(space, operators, "route", operators.route, args)


def _permute(shape: tuple[int, ...], space: Workspace, operators: Operators) -> Prepared:
    tokens, width, top = shape
    experts = 8 * top
    args = (space.take(tokens, width), _chosen(space, tokens, top, experts), experts)
    return _differentiable(space, operators, "permute", operators.permute, args)


def _unpermute(shape: tuple[int, ...], space: Workspace, operators: Operators) -> Prepared:
    tokens, width, top = shape
    order = torch.randperm(tokens * top, device=space.device)
    args = (space.take(tokens * top, width), order, space.take(tokens, top))
    return _differentiable(space, operators, "unpermute", operators.unpermute, args)


_MAKERS: dict[str, Maker] = {
    "linear": _linear("linear"),
    "grouped_linear": _grouped_linear("grouped_linear"),
    "narrow_linear": _linear("narrow_linear"),
    "narrow_grouped_linear": _grouped_linear("narrow_grouped_linear"),
    "attention": _attention,
    "scored_attention": _scored_attention,
    "sink_attention": _sink_attention,
    "biased_attention": _biased_attention,
    "rms_norm": _norm("rms_norm", added=False, biased=False),
    "layer_norm": _norm("layer_norm", added=False, biased=True),
    "add_rms_norm": _norm("add_rms_norm", added=True, biased=False),
    "add_layer_norm": _norm("add_layer_norm", added=True, biased=True),
    "activation": _activation,
    "gated_activation": _gated_activation,
    "rotary": _rotary,
    "add": _add,
    "copy": _copy,
    "embedding": _embedding,
    "linear_cross_entropy": _linear_cross_entropy,
    "route": _route,
    "permute": _permute,
    "unpermute": _unpermute,
    "adamw": _adamw,
}
