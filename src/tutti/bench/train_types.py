"""One model of each type to time: published widths, with as many layers as fit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from tutti.bench.train_speed import SpeedQuestion
from tutti.models import read_config
from tutti.models.families import model_types
from tutti.models.load import catalog_config, catalog_names
from tutti.models.spec import ModelSpec

LEAST_PARAMETERS = 500_000_000  # smaller models say little of how a chip is used


def one_of_each_type(asked: SpeedQuestion, most_parameters: float) -> Iterator[SpeedQuestion]:
    """Return a question per model type: its smallest model of some size, cut to what fits.

    A type whose models are all smaller is there with its largest.
    """
    named: dict[object, list[str]] = {}
    for name in catalog_names():
        named.setdefault(catalog_config(name)["model_type"], []).append(name)
    for kind in model_types():
        if kind not in named:  # of a plug-in
            continue
        models = sorted(named[kind], key=_size)
        fitting = [name for name in models if _size(name) >= LEAST_PARAMETERS]
        model = fitting[0] if fitting else models[-1]
        whole = _whole(model).num_layers
        layers = next((n for n in range(whole, 1, -1) if _size(model, n) <= most_parameters), 1)
        yield _within_positions(
            dataclasses.replace(asked, model=model, layers=None if layers == whole else layers)
        )


def _within_positions(asked: SpeedQuestion) -> SpeedQuestion:
    """Return the same number of tokens in sequences that the model has positions for."""
    length = min(asked.sequence_length, _whole(asked.model).max_length)
    sequences = asked.micro_batch * asked.sequence_length // length
    return dataclasses.replace(asked, micro_batch=sequences, sequence_length=length)


@functools.cache
def _whole(model: str, layers: int | None = None) -> ModelSpec:
    config = dict(catalog_config(model))
    return read_config(config | ({"num_hidden_layers": layers} if layers else {}), model)


def _size(model: str, layers: int | None = None) -> int:
    return _whole(model, layers).num_parameters
