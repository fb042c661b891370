"""Which weight map serves which `model_type`."""

from __future__ import annotations

from collections.abc import Callable, Collection

from tutti.errors import InputError
from tutti.huggingface.weight_map import KeyTable, UnmappedError, WeightMap, resolve
from tutti.models import ModelSpec
from tutti.models.families.registry import PAGE, load_plug_ins

MapFor = Callable[[ModelSpec], WeightMap]  # where an option changes the names

_MAPS: dict[str, WeightMap | MapFor] = {}


def register(weights: WeightMap | MapFor, *model_types: str) -> None:
    """Make a map known for model types; one that is known already cannot be replaced."""
    for model_type in model_types:
        if _MAPS.setdefault(model_type, weights) is not weights:
            raise InputError(
                f"model type '{model_type}' has a weight map already; a package may add types, "
                "not replace them"
            )


def mapped_types() -> tuple[str, ...]:
    """Return every model type whose checkpoints can be read and written."""
    load_plug_ins()
    return tuple(sorted(_MAPS))


def key_table(spec: ModelSpec, keys: Collection[str] | None = None) -> KeyTable:
    """Return where a model's tensors lie in a checkpoint that holds these keys.

    Keys decide one thing: whether they were saved with the base model's name before them.
    """
    if spec.model_type not in _MAPS:
        load_plug_ins()
    if spec.model_type not in _MAPS:
        raise InputError(
            f"{spec.name}: no weight map for model type '{spec.model_type}'; its package must "
            f"register one: {PAGE}"
        )
    declared = _MAPS[spec.model_type]
    weights = declared if isinstance(declared, WeightMap) else declared(spec)
    with_base = not keys or any(key.startswith(weights.base) for key in keys)
    try:
        return resolve(weights, spec, with_base=with_base)
    except UnmappedError as error:
        raise InputError(
            f"{spec.name}: the weight map of '{spec.model_type}' does not name tensor "
            f"'{error.args[0]}'; add it to the map"
        ) from None
