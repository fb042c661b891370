"""Weight maps: which tensors of a Hugging Face checkpoint hold which of ours.

A `WeightMap` is a table from the names of `tutti.models.parameters` to module paths in the files,
one entry for a weight and its bias. A path alone means the same tensor; a rule says how the bytes
lie otherwise. Rules are views (`pieces`), so every map works in both directions. Names are those
on disk: transformers' modules in memory may be fused differently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from tutti.huggingface.pieces import Piece
from tutti.models import AttentionSpec, ModelSpec, Parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of one parameter that a rule is asked about."""

    prefix: str  # of the keys: "model.layers.3."
    leaf: str  # "weight" or "bias"; empty for a tensor that is no module's
    parameter: Parameter
    siblings: Mapping[str, Parameter]  # all of the unit, by name
    attention: AttentionSpec | None  # of the block

    def key(self, path: str) -> str:
        """Return the key of this parameter under a module path."""
        return f"{self.prefix}{path}" + (f".{self.leaf}" if self.leaf else "")


class Rule(Protocol):
    """Says where the bytes of a parameter are."""

    def pieces(self, slot: Slot) -> tuple[Piece, ...]:
        """Return the pieces that make up the parameter."""


@dataclass(frozen=True, slots=True)
class Same:
    """The stored tensor is ours; `leading` ones may stand before its shape."""

    path: str
    leading: int = 0

    def pieces(self, slot: Slot) -> tuple[Piece, ...]:
        """Return one piece."""
        shape = slot.parameter.shape
        return (
            Piece(
                key=slot.key(self.path),
                shape=(1,) * self.leading + shape,
                start=0,
                stop=shape[0],
                view=shape if self.leading else (),
            ),
        )


@dataclass(frozen=True, slots=True)
class Transposed:
    """A weight is stored (in, out), as GPT-2's Conv1D does."""

    path: str

    def pieces(self, slot: Slot) -> tuple[Piece, ...]:
        """Return one piece."""
        shape = slot.parameter.shape
        order = tuple(reversed(range(len(shape)))) if len(shape) > 1 else ()
        return (
            Piece(key=slot.key(self.path), shape=shape[::-1], start=0, stop=shape[0], order=order),
        )


@dataclass(frozen=True, slots=True)
class Rows:
    """Several of our tensors stand one below the other in one: query, key, value; gate, up."""

    path: str
    of: tuple[str, ...]
    transposed: bool = False

    def pieces(self, slot: Slot) -> tuple[Piece, ...]:
        """Return one piece."""
        heights = [slot.siblings[f"{name}.{slot.leaf}"].shape[0] for name in self.of]
        place = self.of.index(slot.parameter.name.removesuffix(f".{slot.leaf}"))
        first, (count, *rest) = sum(heights[:place]), slot.parameter.shape
        stored = (sum(heights), *rest)
        rows = slice(first, first + count)
        turned = self.transposed and bool(rest)
        return (
            Piece(
                key=slot.key(self.path),
                shape=stored[::-1] if turned else stored,
                start=0,
                stop=count,
                index=(slice(None), rows) if turned else (rows,),
                order=(1, 0) if turned else (),
            ),
        )


@dataclass(frozen=True, slots=True)
class Heads:
    """Query, key and value are fused by key-value head: its queries, its key, its value.

    With as many key-value heads as heads this is (query, key, value) of each head in turn
    (GPT-NeoX, Bloom); with one it is all queries, then the key, then the value (Falcon-7B).
    """

    path: str

    def pieces(self, slot: Slot) -> tuple[Piece, ...]:
        """Return one piece."""
        attention = slot.attention
        assert attention is not None
        groups, width = attention.kv_heads, attention.head_dim
        queries = attention.heads // groups
        (count, *rest) = slot.parameter.shape
        which: dict[str, int | slice] = {
            "query": slice(0, queries),
            "key": queries,
            "value": queries + 1,
        }
        part = which[slot.parameter.name.split(".")[1]]
        return (
            Piece(
                key=slot.key(self.path),
                shape=(groups * (queries + 2) * width, *rest),
                start=0,
                stop=count,
                view=(groups, queries + 2, width, *rest),
                index=(slice(None), part),
            ),
        )


@dataclass(frozen=True, slots=True)
class Each:
    """One stored tensor for each expert, or for each head; `{index}` in the path counts them."""

    path: str

    def pieces(self, slot: Slot) -> tuple[Piece, ...]:
        """Return a piece for each."""
        parameter = slot.parameter
        rows, *rest = parameter.shape
        count = parameter.experts or parameter.slice_parts
        height = rows // count
        shape = tuple(rest) if parameter.experts else (height, *rest)
        return tuple(
            Piece(
                key=slot.key(self.path.format(index=index)),
                shape=shape,
                start=index * height,
                stop=(index + 1) * height,
            )
            for index in range(count)
        )


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """All experts in one tensor (experts, in, out), as gpt-oss has them.

    Of `parts` tensors whose columns alternate this is number `part`. Biases are (experts, out),
    and their key ends in "_bias".
    """

    path: str
    part: int = 0
    parts: int = 1

    def pieces(self, slot: Slot) -> tuple[Piece, ...]:
        """Return one piece."""
        experts, out, *in_ = slot.parameter.shape
        alternating = self.parts > 1
        return (
            Piece(
                key=f"{slot.prefix}{self.path}" + ("" if slot.leaf == "weight" else "_bias"),
                shape=(experts, *in_, out * self.parts),
                start=0,
                stop=experts,
                view=(experts, *in_, out, self.parts) if alternating else (),
                index=(..., self.part) if alternating else (),
                order=(0, 2, 1) if in_ else (),
            ),
        )


Table = Mapping[str, str | Rule]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMap:
    """Where a model type keeps its tensors; paths of `block` stand below `layers`."""

    embedding: Table
    block: Table
    head: Table
    layers: str = "model.layers.{layer}."
    base: str = "model."  # left out of the keys of a checkpoint that was saved without a head
    # patterns of stored tensors that a model does not need: recomputed, or not modelled
    carried: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)

    def but(
        self,
        *,
        embedding: Table | None = None,
        block: Table | None = None,
        head: Table | None = None,
        carried: tuple[str, ...] = (),
    ) -> WeightMap:
        """Return the map with other or further entries."""
        return replace(
            self,
            embedding={**self.embedding, **(embedding or {})},
            block={**self.block, **(block or {})},
            head={**self.head, **(head or {})},
            carried=self.carried + carried,
        )


class UnmappedError(KeyError):
    """A parameter of a model that its weight map does not name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """One logical tensor and where its bytes are."""

    name: str  # "3.attention.query.weight"
    parameter: Parameter
    pieces: tuple[Piece, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the logical tensor."""
        return self.parameter.shape


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTable:
    """A weight map worked out for one model: every tensor with its pieces, both ways."""

    tensors: Mapping[str, Located]
    stored: Mapping[str, tuple[tuple[str, Piece], ...]] = field(repr=False)
    carried: tuple[re.Pattern[str], ...] = ()

    def is_carried(self, key: str) -> bool:
        """Tell whether a stored tensor is one that no model needs."""
        return any(pattern.fullmatch(key) for pattern in self.carried)


def resolve(weights: WeightMap, spec: ModelSpec, *, with_base: bool = True) -> KeyTable:
    """Work a map out for a model; `with_base` tells whether keys begin with the map's `base`."""
    tensors: dict[str, Located] = {}
    stored: dict[str, list[tuple[str, Piece]]] = {}
    for unit in range(spec.num_units):
        siblings = {parameter.name: parameter for parameter in spec.parameters(unit)}
        for parameter in siblings.values():
            name = f"{unit}.{parameter.name}"
            pieces = _pieces(weights, spec, unit, parameter, siblings)
            if not with_base:
                pieces = tuple(replace(p, key=p.key.removeprefix(weights.base)) for p in pieces)
            tensors[name] = Located(name=name, parameter=parameter, pieces=pieces)
            for piece in pieces:
                stored.setdefault(piece.key, []).append((name, piece))
    return KeyTable(
        tensors=tensors,
        stored={key: tuple(parts) for key, parts in stored.items()},
        carried=_carried(weights, spec, with_base=with_base),
    )


def _pieces(
    weights: WeightMap,
    spec: ModelSpec,
    unit: int,
    parameter: Parameter,
    siblings: Mapping[str, Parameter],
) -> tuple[Piece, ...]:
    inside = 1 <= unit <= spec.num_layers
    prefix = weights.layers.format(layer=unit - 1) if inside else ""
    table = weights.block if inside else weights.embedding if unit == 0 else weights.head
    module, _, leaf = parameter.name.rpartition(".")
    rule, leaf = (
        (table[parameter.name], "") if parameter.name in table else (table.get(module), leaf)
    )
    if rule is None and unit == spec.head_unit and spec.head.scores and module == "score":
        rule = "score"  # so do all of transformers' decoders call it
    if rule is None:
        raise UnmappedError(f"{unit}.{parameter.name}")
    slot = Slot(
        prefix=prefix,
        leaf=leaf,
        parameter=parameter,
        siblings=siblings,
        attention=spec.block(unit).attention if inside else None,
    )
    return (Same(rule) if isinstance(rule, str) else rule).pieces(slot)


def _carried(
    weights: WeightMap, spec: ModelSpec, *, with_base: bool
) -> tuple[re.Pattern[str], ...]:
    layers = weights.layers if with_base else weights.layers.removeprefix(weights.base)
    heads = range(spec.num_layers, spec.num_layers + spec.published_prediction_heads)
    extra = [re.escape(layers.format(layer=layer)) + ".*" for layer in heads]
    return tuple(map(re.compile, (*weights.carried, *extra)))
