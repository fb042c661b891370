"""How PEFT names what an adapter adds to: modules in memory, and experts as stacked parameters.

A linear layer's factors stand under its module, those of layers that a folder stores fused under
one. Experts are one parameter of a module each (`gate_up_proj`, `down_proj`): PEFT wraps the module
once for each of them, so that the factors of the first stand under `base_layer`. Of experts it
stacks A (experts·rank, in) by expert, and B (out, rank·experts) with the expert counted fastest.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from tutti.errors import InputError
from tutti.huggingface.maps import key_table
from tutti.huggingface.pieces import Piece
from tutti.models import ModelSpec

EXPERT_MODULE = "mlp.experts"  # below a block, in transformers' memory
EXPERT_PARTS = {
    "gate_up_proj": ("moe.experts.gate", "moe.experts.up"),
    "down_proj": ("moe.experts.down",),
}


class LinearModule(NamedTuple):
    """A linear module of a checkpoint, and which of our layers it is."""

    path: str  # "model.layers.3.self_attn.q_proj"
    parts: tuple[tuple[str, Piece], ...]  # name of the weight, its rows

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of its layers, with their unit."""
        return tuple(name.removesuffix(".weight") for name, _ in self.parts)

    @property
    def is_transposed(self) -> bool:
        """Whether the weight is stored (in, out)."""
        return bool(self.parts[0][1].order)


@functools.lru_cache(maxsize=32)
def linear_modules(spec: ModelSpec) -> tuple[LinearModule, ...]:
    """Return the linear modules of a model's blocks, in order; experts are none."""
    table = key_table(spec.untuned, None)
    modules: dict[str, LinearModule] = {}
    for located in table.tensors.values():
        unit = int(located.name.partition(".")[0])
        if not 0 < unit < spec.head_unit or not located.parameter.matmul_uses:
            continue
        for piece in located.pieces if not located.parameter.experts else ():
            path = piece.key.removesuffix(".weight")
            modules[path] = LinearModule(path, table.stored[piece.key])
    return tuple(modules.values())


@functools.lru_cache(maxsize=32)
def expert_modules(spec: ModelSpec) -> dict[int, str]:
    """Return the path of each block's experts in transformers' memory, by unit."""
    paths: dict[int, str] = {}
    for unit in range(1, spec.head_unit):
        if spec.block(unit).moe is None:
            continue
        modules = [m for m in linear_modules(spec) if m.layers[0].startswith(f"{unit}.attention")]
        prefix = modules[0].path.rpartition(".")[0].rpartition(".")[0]
        paths[unit] = f"{prefix}.{EXPERT_MODULE}"
    return paths


def fused_layers(spec: ModelSpec) -> tuple[tuple[str, ...], ...]:
    """Return layers that a folder stores as one, and whose adapters therefore share a factor."""
    groups = {
        tuple(name.partition(".")[2] for name in module.layers): None
        for module in linear_modules(spec)
        if len(module.parts) > 1
    }
    experts = {layers: None for layers in EXPERT_PARTS.values() if len(layers) > 1}
    return (*groups, *experts) if spec.num_experts else tuple(groups)


def module_path(spec: ModelSpec, name: str) -> str:
    """Return the module of a tensor that is trained whole beside an adapter."""
    located = key_table(spec.untuned, None).tensors[name]
    if len(located.pieces) != 1 or not located.pieces[0].plain:
        raise InputError(
            f"'{name}' is trained beside an adapter, but {spec.name} stores it as a part of "
            "another tensor; PEFT saves whole modules: train all of them, or none"
        )
    return located.pieces[0].key
