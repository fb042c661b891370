"""What the columns of published runs leave open, as data: conventions of sources, public models."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, TypeVar

from tutti import document, files
from tutti.document import BytesPerSecond, Count, Place

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """A field of the strategy that a text column gives away."""

    column: str
    contains: str
    field: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """How one source of runs means its columns."""

    source: str
    tied: bool = False
    dropout: bool = False
    grad_bytes: float = 2.0  # per gradient element that travels
    stops_early: bool = False  # recomputation leaves a block's last product out
    dispatches_once: bool = False  # a token goes to a node once, and from there to its experts
    overlaps_gradients: bool = True  # their reduction runs beside the last backward pass
    splits_local_batch: bool = False  # `mbs` is the local batch, split into pp micro-batches
    micro_batch: Count | None = None  # where the column is empty
    pipelined_micro_batch: Count | None = None
    interleave: Count | None = None  # model chunks per stage of a pipeline, where empty
    nic: BytesPerSecond | None = None  # of a node, where it is not the chip's usual node's
    nics: Count | None = None
    most_chips_per_node: Count | None = None
    assume: Mapping[str, str] = field(default_factory=dict)  # for cells that say nothing usable
    cell: tuple[str, ...] = ()  # columns within which rows reveal each other; none: each its own
    state_bytes: float = 12.0  # of the optimizer per parameter
    eager_loss: bool = False  # cross-entropy keeps fp32 copies of the logits
    process_memory: bool = False  # memory is the process', not the allocator's
    hints: tuple[Hint, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicModels:
    """Public facts about models, by the beginning of their folded names."""

    shapes: Mapping[str, str]
    vocabularies: Mapping[str, Count]
    unpriced: Mapping[str, str]
    expert_width_is_ffn: tuple[str, ...]

    def shape(self, model: str) -> str | None:
        """Return the catalog's name of a model."""
        return _longest(self.shapes, folded(model))

    def vocabulary(self, model: str) -> int | None:
        """Return the size of a model's vocabulary."""
        return _longest(self.vocabularies, folded(model))

    def why_unpriced(self, model: str) -> str | None:
        """Return why a model cannot be priced, if so."""
        name = folded(model)
        return next((why for word, why in self.unpriced.items() if word in name), None)

    def experts_are_ffn_wide(self, model: str) -> bool:
        """Tell whether the column `ffn` is the width of one expert."""
        return folded(model).startswith(self.expert_width_is_ffn)


def folded(text: str) -> str:
    """Return a text as the tables spell it: lower case, letters and digits only."""
    return re.sub(r"[^a-z0-9]", "", text.casefold())


def _longest(table: Mapping[str, T], name: str) -> T | None:
    prefixes = [key for key in table if name.startswith(key)]
    return table[max(prefixes, key=len)] if prefixes else None


def _read(name: str) -> Any:
    text = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    return files.parse_yaml(text, name)


@functools.lru_cache(maxsize=1)
def _conventions() -> Mapping[str, Convention]:
    raw = _read("conventions.yaml")
    default = raw["default"]
    merged = {
        name: {**default, **entry, "hints": [*default["hints"], *entry.get("hints", [])]}
        for name, entry in raw.items()
        if name != "default"
    }
    place = Place("conventions.yaml")
    return document.build(dict[str, Convention], {"default": default, **merged}, place)


def convention(group: str) -> Convention:
    """Return how a group means its columns."""
    known = _conventions()
    return known.get(group, known["default"])


@functools.lru_cache(maxsize=1)
def public_models() -> PublicModels:
    """Return what is publicly known of models."""
    return document.build(PublicModels, _read("models.yaml"), Place("models.yaml"))
