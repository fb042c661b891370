"""Longer context: rotary positions are stretched, in config.json; weights stay as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tutti.errors import InputError, hint
from tutti.huggingface.conversion import Conversion, Progress, export
from tutti.huggingface.folders import open_checkpoint
from tutti.huggingface.surgery.changed import Changed, config_of
from tutti.models import ModelSpec, read_config

KINDS = ("yarn", "linear")


def stretch(
    folder: Path,
    target: Path,
    *,
    factor: float,
    kind: str = "yarn",
    progress: Progress = lambda _doing, _done, _whole: None,
) -> Conversion:
    """Write a model whose context is `factor` times as long."""
    inner = open_checkpoint(folder)
    place = str(folder / "config.json")
    config = stretched(config_of(inner), inner.spec, place, factor=factor, kind=kind)
    spec = read_config(config, inner.spec.name, place)
    texts = {"config.json": json.dumps(config, indent=2) + "\n"}
    return export(Changed(inner, spec), target, texts=texts, progress=progress)


def stretched(
    config: Mapping[str, Any], spec: ModelSpec, place: str, *, factor: float, kind: str
) -> dict[str, Any]:
    """Return a config.json that says so, in the form that the file has."""
    if kind not in KINDS:
        raise InputError(f"--kind is '{kind}'; {hint(kind, KINDS)}")
    if not 1 < factor <= 1024:
        raise InputError(f"--factor is {factor:g}; must be above 1, and 1024 at most")
    rotary = [block.attention.rotary for block in spec.blocks]
    if not any(rotary):
        raise InputError(f"{place}: {spec.model_type} has no rotary positions to stretch")
    given = config.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in given.values()):
        raise InputError(
            f"{place}: 'rope_parameters' has settings for each kind of layer; stretch those that "
            "see everything there, by hand"
        )
    scaled = next((each.scaling for each in rotary if each and each.scaling), None)
    if scaled is not None:
        raise InputError(
            f"{place}: its positions are stretched already ({scaled.kind}, by {scaled.factor:g}); "
            "begin with the model that was not, or edit the file"
        )
    rope: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = spec.max_length
    longer = {"max_position_embeddings": round(spec.max_length * factor)}
    if "rope_parameters" in config:
        return {**config, **longer, "rope_parameters": {**given, **rope}}
    return {**config, **longer, "rope_scaling": rope}
