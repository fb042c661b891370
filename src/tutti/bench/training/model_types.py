"""One model of each type to time: published widths, with as many layers as fit.

Each is timed in a process of its own: what one leaves in memory, or breaks, is not the next one's.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from tutti.bench.training.question import SpeedQuestion
from tutti.bench.training.speed import speeds
from tutti.errors import InputError, hint
from tutti.models import read_config
from tutti.models.families import model_types
from tutti.models.load import catalog_config, catalog_names
from tutti.models.spec import ModelSpec

LEAST_PARAMETERS = 500_000_000  # smaller models say little of how a chip is used


def one_of_each_type(
    asked: SpeedQuestion, most_parameters: float, types: Sequence[str] = ()
) -> Iterator[SpeedQuestion]:
    """Return a question per model type: its smallest model of some size, cut to what fits.

    A type whose models are all smaller is there with its largest. `types`: these alone.
    """
    for wanted in types:
        if wanted not in model_types():
            raise InputError(f"--types: '{wanted}'; {hint(wanted, model_types())}")
    named: dict[object, list[str]] = {}
    for name in catalog_names():
        named.setdefault(catalog_config(name)["model_type"], []).append(name)
    for kind in model_types():
        if kind not in named or (types and kind not in types):  # of a plug-in, or not asked for
            continue
        models = sorted(named[kind], key=_size)
        fitting = [name for name in models if _size(name) >= LEAST_PARAMETERS]
        model = fitting[0] if fitting else models[-1]
        whole = _whole(model).num_layers
        layers = next((n for n in range(whole, 1, -1) if _size(model, n) <= most_parameters), 1)
        yield _within_positions(
            dataclasses.replace(asked, model=model, layers=None if layers == whole else layers)
        )


def speeds_apart(
    questions: Sequence[SpeedQuestion], *, peers: bool
) -> Iterator[tuple[SpeedQuestion, list[dict[str, Any]]]]:
    """Yield each question with its rows; a process that dies is a row that says so."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "tutti.bench.training.speed"])
    for asked in questions:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            try:
                rows = pool.submit(_timed, asked, peers).result()
            except BrokenProcessPool:
                rows = [{"who": "tutti", "failed": "its process died"}]
        yield asked, rows


def _timed(asked: SpeedQuestion, peers: bool) -> list[dict[str, Any]]:
    try:
        return speeds(asked, _silent, peers=peers)
    except Exception as error:  # the other types are timed all the same
        return [{"who": "tutti", "failed": f"{type(error).__name__}: {error}".splitlines()[0]}]


def _silent(_text: str) -> None:
    """Say nothing: the process that asked shows what is timed."""


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
