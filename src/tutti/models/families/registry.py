"""Which adapter reads which `model_type`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from tutti import plug_ins
from tutti.document import Place, shown
from tutti.errors import InputError, hint
from tutti.models.config import Config
from tutti.models.families.nearest import nearest_family
from tutti.models.spec import ModelSpec


class Family(Protocol):
    """Reads the config.json of one model type."""

    @property
    def model_type(self) -> str:
        """As Hugging Face calls it."""

    @property
    def defaults(self) -> Mapping[str, object]:
        """What transformers assumes where a key is absent."""

    def read(self, config: Config, name: str) -> ModelSpec:
        """Return the model that the config describes; ValueError if its parts do not fit."""


_FAMILIES: dict[str, Family] = {}

# Packages that add model types: installed ones name a module in this group of entry points, others
# are named in the environment. Importing the module calls `register`, here and for weight maps.
ENTRY_POINTS = "tutti.models"
MODULES = "TUTTI_MODELS"
PAGE = "docs/extend/add-a-model.md"

# Options of any type that change the computation and that no adapter models.
_NEVER: Mapping[str, tuple[object, ...]] = {
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "use_bidirectional_attention": (False, None),
    "attention_chunk_size": (None,),
    "per_layer_config": (None, {}),
    "layerdrop": (0, 0.0, None),
}


# Layers that no adapter models, by the fields that give them away.
_UNKNOWN_LAYERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "linear attention",
        (
            "linear_num_key_heads",
            "linear_num_heads",
            "linear_attn_config",
            "linear_attn_alpha_factor",
            "lightning_head_dim",
        ),
    ),
    (
        "state-space layers",
        ("mamba_d_state", "ssm_state_size", "mamba_expand", "ssm_cfg", "hybrid_override_pattern"),
    ),
    ("short convolutions", ("conv_L_cache",)),
    ("a recurrence in the place of some attention", ("lru_width",)),
)
# Whole encoders beside the decoder.
_UNKNOWN_TOWERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("a vision tower", ("vision_config", "vision_tower_config")),
    ("an audio tower", ("audio_config",)),
)
# Types whose fields give nothing away.
_UNKNOWN_TYPES: Mapping[str, str] = {
    "mamba": "state-space layers",
    "mamba2": "state-space layers",
    "falcon_mamba": "state-space layers",
    "rwkv": "a recurrence in the place of attention",
    "xlstm": "a recurrence in the place of attention",
}


def register(*families: Family) -> None:
    """Make adapters known; a type that is known already cannot be replaced."""
    for family in families:
        known = _FAMILIES.setdefault(family.model_type, family)
        if known is not family:
            raise InputError(
                f"model type '{family.model_type}' is registered already; a package may add types, "
                "not replace them"
            )


@functools.cache
def load_plug_ins() -> None:
    """Import packages that add model types, once; only where a type is not ours."""
    plug_ins.load(ENTRY_POINTS, MODULES)


def model_types() -> tuple[str, ...]:
    """Return every model type that is understood."""
    load_plug_ins()
    return tuple(sorted(_FAMILIES))


def read_config(values: Mapping[str, object], name: str, file: str | None = None) -> ModelSpec:
    """Return the model that a config.json describes; `file` is what errors call it."""
    place = Place(file or name)
    model_type = values.get("model_type")
    if model_type is None:
        raise place.error(
            "'model_type' is missing; this is not the config.json of a Hugging Face model"
        )
    if isinstance(model_type, str) and model_type not in _FAMILIES:
        load_plug_ins()
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        raise place.key("model_type").value_error(
            f"is {shown(model_type)}, which is not supported; {_remedy(values)}"
        )
    spec = _read(_FAMILIES[model_type], values, name, place)
    return spec.with_scores() if _gives_scores(values, place) else spec


def _gives_scores(values: Mapping[str, object], place: Place) -> bool:
    """Tell whether a folder holds a reward model: one label of a whole text."""
    names = values.get("architectures")
    named = names if isinstance(names, list) else []
    if not any(str(name).endswith("ForSequenceClassification") for name in named):
        return False
    labels = values.get("id2label")
    count = len(labels) if isinstance(labels, dict) else values.get("num_labels", 2)
    if count != 1:
        raise place.key("num_labels").value_error(
            f"is {shown(count)}; of models of whole texts only those with one label, reward "
            "models, are read"
        )
    return True


def _remedy(values: Mapping[str, object]) -> str:
    inner = values.get("text_config")
    if isinstance(inner, dict) and inner.get("model_type") in list(_FAMILIES):
        return "only its 'text_config' can be read; save that as a config.json of its own"
    for part, near_it in _unknown_parts(values):
        near = nearest_family(values, _FAMILIES.values(), _read) if near_it else None
        beside = f"; otherwise {near}" if near else ""
        return f"it has {part}, which tutti does not compute{beside}"
    near = nearest_family(values, _FAMILIES.values(), _read)
    if near is None:
        near = hint(str(values.get("model_type")), _FAMILIES)
    return f"{near.removesuffix('?')}; {PAGE} shows how to add a type"


def _unknown_parts(values: Mapping[str, object]) -> Iterator[tuple[str, bool]]:
    """Yield what no adapter models, and whether the rest is like another type."""
    for table in (_UNKNOWN_TOWERS, _UNKNOWN_LAYERS):
        for part, keys in table:
            for key in keys:
                if values.get(key) is not None:
                    yield f"{part} ('{key}')", table is _UNKNOWN_LAYERS
    if (part_of := _UNKNOWN_TYPES.get(str(values.get("model_type")))) is not None:
        yield part_of, False


def _read(family: Family, values: Mapping[str, object], name: str, place: Place) -> ModelSpec:
    config = Config(values=values, place=place, defaults=family.defaults)
    for key, allowed in _NEVER.items():
        config.refuse_unless(key, *allowed, why="tutti does not model that option")
    return _guarded(lambda: family.read(config, name), place)


def _guarded(read: Callable[[], ModelSpec], place: Place) -> ModelSpec:
    try:
        return read()
    except InputError:
        raise
    except ValueError as error:  # parts that do not fit each other say so themselves
        raise place.error(str(error)) from None
