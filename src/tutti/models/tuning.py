"""What of a model is trained: all of it, parts named by pattern, or low-rank adapters beside it.

A `Tuning` is a fact of the model: it decides which tensors exist and which of them have gradients,
so ownership, prices, the engine and checkpoints follow from `ModelSpec.parameters` as ever. An
adapter adds up·down·scale to a weight (LoRA, Hu et al. 2021); with DoRA (Liu et al. 2024) each
output is then brought to a trained magnitude.

Names are the model's own ("attention.query", "mlp.down", "moe.experts.gate"), as shell patterns,
with or without the unit before them ("3.mlp.*"); Hugging Face's usual ones are understood, too.
"""

from __future__ import annotations

import fnmatch
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from tutti.document import Above, Count
from tutti.errors import InputError, hint
from tutti.models.parameters import Parameter, ParameterClass, ParameterKind

ALL_LINEAR = "all-linear"
DOWN, UP, MAGNITUDE = "lora_down", "lora_up", "lora_magnitude"
SIDES = (DOWN, UP, MAGNITUDE)
Base = Literal["wide", "int8", "nf4"]
BASE_BYTES: dict[str, float] = {"int8": 1.0 + 4.0 / 128, "nf4": 0.5 + 4.0 / 64}
"""Of a number of a frozen weight: its code, and its part of the scale of its group."""

_ALIASES = {
    "q_proj": "attention.query",
    "k_proj": "attention.key",
    "v_proj": "attention.value",
    "o_proj": "attention.output",
    "gate_proj": "*.gate",
    "up_proj": "*.up",
    "down_proj": "*.down",
    "gate_up_proj": "*.gate *.up",
    "w1": "*.gate",
    "w2": "*.down",
    "w3": "*.up",
    "experts": "moe.experts.*",
}
_ROUTING = ("moe.router", "moe.shared_gate")  # linear, but no part of "all-linear"
_TOGETHER = (("moe.experts.gate", "moe.experts.up"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """Low-rank adapters on some linear layers."""

    method: Literal["lora", "dora"] = "lora"
    rank: Count = 16
    alpha: Annotated[float, Above(0)] = 32.0
    rank_stabilised: bool = False  # scale alpha ÷ √rank instead of alpha ÷ rank
    targets: tuple[str, ...] = (ALL_LINEAR,)
    joined: tuple[tuple[str, ...], ...] = _TOGETHER  # layers of one `down`: a folder has them fused

    @property
    def scale(self) -> float:
        """What up · down is multiplied with."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Which tensors are trained."""

    adapter: AdapterSpec | None = None
    frozen: tuple[str, ...] = ()  # patterns of tensors; beside an adapter all are
    trained: tuple[str, ...] = ()  # patterns of tensors that are trained nevertheless
    base: Base = "wide"  # how frozen linear weights are held

    def __post_init__(self) -> None:
        if self.adapter is None and not self.frozen:
            raise ValueError("nothing is frozen and there is no adapter; leave 'tuning' out")
        if self.base != "wide" and self.adapter is None:
            raise ValueError(f"base: {self.base} is for weights beside an adapter; give one")

    def of(self, unit: int, own: Sequence[Parameter], *, head: int) -> tuple[Parameter, ...]:
        """Return a unit's tensors as they are trained; `head` is the last unit."""
        return tuned_parameters(self, unit, own, is_block=0 < unit < head)

    def is_trained(self, unit: int, parameter: Parameter) -> bool:
        """Tell whether a tensor of the model itself is trained."""
        if not parameter.trainable:
            return False
        owner = parameter.tied_to or f"{unit}.{parameter.name}"
        if matches(owner, self.trained):
            return True
        return self.adapter is None and not matches(owner, self.frozen)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Tell whether a name with its unit ("3.mlp.down.weight") is meant by a pattern."""
    bare = name.partition(".")[2]
    return any(
        fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(bare, pattern)
        for given in patterns
        for pattern in _ALIASES.get(given, given).split()
    )


def tuned_parameters(
    tuning: Tuning, unit: int, parameters: Sequence[Parameter], *, is_block: bool
) -> tuple[Parameter, ...]:
    """Return a unit's tensors as they are trained, those of its adapters behind them."""
    tuned = [
        p
        if tuning.is_trained(unit, p) or not p.trainable
        else replace(p, trainable=False, frozen=True)
        for p in parameters
    ]
    if tuning.adapter is not None and is_block:
        tuned += _adapters(tuning.adapter, unit, parameters)
    return tuple(tuned)


def adapted_layers(
    adapter: AdapterSpec, unit: int, parameters: Sequence[Parameter]
) -> list[tuple[Parameter, ...]]:
    """Return the weights of a block that adapters add to; those of one `down` stand together."""
    weights = {layer_of(p): p for p in parameters if p.matmul_uses}
    chosen = [name for name in weights if _is_target(adapter, unit, name)]
    groups: list[tuple[Parameter, ...]] = []
    for name in chosen:
        together = next((group for group in adapter.joined if name in group), (name,))
        own = tuple(member for member in together if member in weights)
        if missing := [member for member in own if member not in chosen]:
            raise InputError(
                f"adapter: targets '{name}', which has one factor together with '{missing[0]}'; "
                "name both, or neither"
            )
        if name == own[0]:
            groups.append(tuple(weights[member] for member in own))
    return groups


def _is_target(adapter: AdapterSpec, unit: int, layer: str) -> bool:
    if ALL_LINEAR in adapter.targets and layer not in _ROUTING:
        return True
    return matches(f"{unit}.{layer}", adapter.targets)


def layer_of(weight: Parameter) -> str:
    """Return the name of a weight's linear layer."""
    return weight.name.removesuffix(".weight")


def _adapters(
    adapter: AdapterSpec, unit: int, parameters: Sequence[Parameter]
) -> Iterator[Parameter]:
    for group in adapted_layers(adapter, unit, parameters):
        if adapter.method == "dora" and group[0].experts:
            raise InputError(
                f"adapter: DoRA has no form for experts ('{layer_of(group[0])}'); take lora, or "
                "name other targets, as in targets: [attention.*]"
            )
        yield _down(adapter.rank, group[0])
        for weight in group:
            yield _up(adapter.rank, weight)
            if adapter.method == "dora":
                yield _magnitude(weight)


def _down(rank: int, weight: Parameter) -> Parameter:
    """Return the factor of a layer's input: (rank, in), or one of each expert."""
    *outer, _, width = weight.shape
    last = len(weight.shape) - 1
    return _factor(weight, DOWN, (*outer, rank, width), last)


def _up(rank: int, weight: Parameter) -> Parameter:
    """Return the factor of a layer's output: (out, rank), or one of each expert."""
    *outer, out, _ = weight.shape
    return _factor(weight, UP, (*outer, out, rank), len(weight.shape) - 2)


def _factor(weight: Parameter, side: str, shape: tuple[int, ...], dim: int) -> Parameter:
    """Return a factor, sliced where it shares the dimension that its weight is sliced along.

    Where it does not, every rank holds it and makes a part of its gradient: its slice's.
    """
    shares = weight.slice_dim == dim
    return replace(
        weight,
        name=f"{layer_of(weight)}.{side}",
        shape=shape,
        slice_dim=dim if shares else None,
        slice_parts=weight.slice_parts if shares else 1,
        in_part=weight.in_part if shares or weight.slice_dim is None else "always",
    )


def _magnitude(weight: Parameter) -> Parameter:
    """Return the lengths of a weight's rows."""
    sliced = weight.slice_dim == 0
    return replace(
        weight,
        name=f"{layer_of(weight)}.{MAGNITUDE}",
        shape=weight.shape[:1],
        kind=ParameterKind.OTHER,
        slice_dim=0 if sliced else None,
        slice_parts=weight.slice_parts if sliced else 1,
        in_part=weight.in_part if sliced or weight.slice_dim is None else "always",
        matmul_uses=0,
    )


def is_adapter(name: str) -> bool:
    """Tell whether a tensor is an adapter's, by its name."""
    return name.rpartition(".")[2] in SIDES


def is_narrowed(parameter: Parameter) -> bool:
    """Tell whether a frozen tensor is one that is held in few bits: a weight of a block's layer."""
    return (
        parameter.frozen
        and parameter.kind is ParameterKind.LINEAR
        and layer_of(parameter) not in (*_ROUTING, "logits", "project_in", "project_out")
        and not parameter.name.startswith("prediction.")
    )


def require_targets(tuning: Tuning, layers: Iterable[str]) -> None:
    """Refuse targets that no block has, with the nearest name; `layers` are those of all blocks."""
    known = sorted(set(layers))
    targets = tuning.adapter.targets if tuning.adapter is not None else ()
    for target in targets:
        if target == ALL_LINEAR:
            continue
        bare = [f"{unit}.{name}" for name in known for unit in _units_of(target)]
        if not any(matches(name, (target,)) for name in bare):
            raise InputError(
                f"adapter: target '{target}' is no linear layer; {hint(target, known)}"
            )


def _units_of(target: str) -> tuple[str, ...]:
    head = target.partition(".")[0]
    return (head,) if head.isdigit() else ("1",)


@functools.lru_cache(maxsize=512)
def trained_share(parameters: tuple[Parameter, ...], group: ParameterClass | None = None) -> float:
    """Return the share of a unit's own products whose weights have gradients."""
    own = [p for p in parameters if not is_adapter(p.name) and group in (None, p.group)]
    used = [(p.activated_size * max(1, p.matmul_uses), p.trainable) for p in own if _is_product(p)]
    total = sum(size for size, _ in used)
    return sum(size for size, trained in used if trained) / total if total else 1.0


def _is_product(parameter: Parameter) -> bool:
    return bool(parameter.matmul_uses) or parameter.kind is ParameterKind.EMBEDDING


def is_read_again(tuning: Tuning | None, parameter: Parameter) -> bool:
    """Tell whether a run keeps nothing of a tensor: beside adapters, frozen ones are the base's."""
    return tuning is not None and tuning.adapter is not None and parameter.frozen
