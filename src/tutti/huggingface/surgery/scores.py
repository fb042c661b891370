"""Reward models as Hugging Face folders: `AutoModelForSequenceClassification` with one label.

A folder of a model that predicts tokens begins one: all but its head is taken.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tutti.huggingface.checkpoint import Checkpoint, StoredFile
from tutti.huggingface.dtypes import Dtype
from tutti.huggingface.surgery.changed import Changed, config_of

_TEXTS = "ForSequenceClassification"
_TOKENS = ("ForCausalLM", "LMHeadModel")


def scoring_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json as a reward model's: transformers finds its class and one label."""
    names = [str(name) for name in config.get("architectures") or ()]
    if any(name.endswith(_TEXTS) for name in names):
        return dict(config)
    for ending in _TOKENS:
        names = [name.removesuffix(ending) for name in names]
    label = "LABEL_0"
    return {
        **config,
        "architectures": [f"{name}{_TEXTS}" for name in names],
        "num_labels": 1,
        "id2label": {"0": label},
        "label2id": {label: 0},
        # where texts of several lengths come together, transformers has to know what fills them up
        "pad_token_id": _first_token(config, "pad_token_id", "eos_token_id"),
    }


def _first_token(config: Mapping[str, Any], *keys: str) -> int:
    for key in keys:
        value = config.get(key)
        token = value[0] if isinstance(value, list) and value else value
        if isinstance(token, int) and token >= 0:
            return token
    return 0


class ScoringBase(Changed):
    """A model that predicts tokens as the base of a reward model: its score is yet to come."""

    def __init__(self, inner: Checkpoint) -> None:
        super().__init__(inner, inner.spec.with_scores())

    def dtype(self, name: str) -> Dtype:
        """Return the number format of a tensor; the score's is the embedding's."""
        return self.inner.dtype("0.token.weight" if name.endswith("score.weight") else name)

    @property
    def stored(self) -> Mapping[str, StoredFile]:
        """None: without the head the files are others."""
        return {}


def scoring_texts(checkpoint: Checkpoint, dtype: Dtype | None = None) -> dict[str, str]:
    """Return the files that are written anew where a reward model is exported."""
    if not checkpoint.spec.head.scores:
        return {}
    config = scoring_config(config_of(checkpoint))
    if dtype is not None:
        key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
        config[key] = dtype.name
    return {"config.json": json.dumps(config, indent=2) + "\n"}
