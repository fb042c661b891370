"""Which stored tensors belong to one quantised weight, found by their names and number formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tutti.errors import InputError
from tutti.huggingface.quantised.scheme import Scheme
from tutti.huggingface.tensor_file import Entry

FLOATS = ("float8_e4m3fn", "float8_e5m2")
# of the input's or the cache's scaling, and marks of a layout; products are made with the weights'
_BESIDE = ("input_scale", "activation_scale", "input_zero_point", "input_scale_ub", "weight_format")
_CACHE = ("k_scale", "v_scale", "q_scale", "output_scale", "k_proj.output_scale")
_PACKED = {
    "qweight": ("qzeros", "scales"),
    "weight_packed": ("weight_scale", "weight_shape"),
}
_OPTIONAL = {"qweight": ("g_idx",), "weight_packed": ("weight_zero_point", "weight_g_idx")}
_SCALES = ("weight_scale_inv", "weight_scale", "SCB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One quantised weight: the tensors that it is made of, by their last names."""

    name: str  # "model.layers.3.mlp.up_proj"
    parts: Mapping[str, Entry]

    @property
    def key(self) -> str:
        """Under which a plain folder would have the weight."""
        return f"{self.name}.weight"

    def part(self, *names: str) -> Entry:
        """Return the first of its tensors that is there."""
        for name in names:
            if name in self.parts:
                return self.parts[name]
        raise InputError(f"tensor '{self.name}.{names[0]}' is missing beside '{self.first}'")

    @property
    def first(self) -> str:
        """The tensor that holds the codes."""
        return next(iter(self.parts.values())).key


def find_modules(
    scheme: Scheme, entries: Mapping[str, Entry]
) -> tuple[dict[str, Module], frozenset[str]]:
    """Return the quantised weights by the keys that plain folders have for them, and their tensors.

    Among these are those that say how inputs would be scaled.
    """
    modules: dict[str, Module] = {}
    used: set[str] = set()
    for key, entry in entries.items():
        name, _, leaf = key.rpartition(".")
        if leaf in _BESIDE or leaf in _CACHE:
            used.add(key)
        names = _parts_of(scheme, name, leaf, entry, entries)
        if names is None:
            continue
        parts = {leaf: entry}
        parts |= {n: entries[f"{name}.{n}"] for n in names if f"{name}.{n}" in entries}
        modules[f"{name}.weight"] = Module(name=name, parts=parts)
        used |= {part.key for part in parts.values()}
    return modules, frozenset(used)


def _parts_of(
    scheme: Scheme, name: str, leaf: str, entry: Entry, entries: Mapping[str, Entry]
) -> tuple[str, ...] | None:
    """Return the last names of what may stand beside codes; None: these are none."""
    if leaf in _PACKED and scheme.method in ("awq", "gptq", "compressed-tensors"):
        needed = _PACKED[leaf]
        lacking = next((n for n in needed if f"{name}.{n}" not in entries), None)
        if lacking is not None:
            raise InputError(f"tensor '{name}.{lacking}' is missing beside '{entry.key}'")
        return (*needed, *_OPTIONAL[leaf])
    if leaf != "weight" or (entry.dtype.name not in FLOATS and entry.dtype.name != "int8"):
        return None
    if not any(f"{name}.{n}" in entries for n in _SCALES):
        raise InputError(
            f"tensor '{entry.key}' is {entry.dtype.code}, and no '{name}.weight_scale' says what "
            "its numbers stand for"
        )
    return (*_SCALES, "weight_zero_point")
