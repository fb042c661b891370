"""Weights from the ranks that train to a model that answers, in memory; and a held reference.

Every number of a model is one rank's to save, under any plan; each puts its own into a buffer of
zeros, and the sum over all ranks is the whole, to the bit. So nothing has to be known of the plan,
and nothing touches a disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tutti.huggingface import open_checkpoint
from tutti.models.spec import ModelSpec
from tutti.models.tuning import is_adapter
from tutti.nn import Model
from tutti.nn.initialize import initialize
from tutti.nn.quantised import fill_narrow
from tutti.train.checkpoint.contents import Piece, StateKind, kept_pieces, written_pieces
from tutti.train.engine.engine import Engine
from tutti.train.run.config import TrainConfig
from tutti.train.run.weights import model_folder, wants_pretrained

Add = Callable[[Tensor], None]


def trained_names(spec: ModelSpec, unit: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return the tensors of a unit that are trained, with their shapes; tied ones once."""
    return [
        (f"{unit}.{parameter.name}", parameter.shape)
        for parameter in spec.parameters(unit)
        if parameter.trainable and parameter.tied_to is None
    ]


@torch.no_grad()
def hand_over(
    engine: Engine | None,
    spec: ModelSpec,
    model: Model | None,
    add: Add,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Give a model the weights that an engine trains; all ranks take part, unit by unit.

    `add` replaces a tensor by its sum over all of them. Who trains nothing has no engine, and who
    answers nothing no model.
    """
    own: dict[str, list[Piece]] = {}
    for piece in () if engine is None else written_pieces(engine):
        if piece.kind is StateKind.WEIGHT:
            own.setdefault(piece.name, []).append(piece)
    views: dict[str, list[Tensor]] = {}
    for logical in () if model is None else model.logical_tensors():
        name = logical.piece.parameter.tied_to or logical.name
        views.setdefault(name, []).append(logical.view)
    for unit in range(spec.num_units):
        named = trained_names(spec, unit)
        if not named:
            continue
        sizes = [torch.Size(shape).numel() for _, shape in named]
        flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        parts = torch.split(flat, sizes)
        for (name, shape), part in zip(named, parts, strict=True):
            for piece in own.get(name, ()):
                part.view(shape)[piece.rectangle.slices] = piece.memory.to(device, dtype)
        add(flat)
        for (name, shape), part in zip(named, parts, strict=True):
            for view in views.get(name, ()):
                view.copy_(part.view(shape))


@torch.no_grad()
def answering_model(
    spec: ModelSpec, config: TrainConfig, model: Model, device: torch.device
) -> Model:
    """Fill what is not trained, and so never handed over: the base below adapters."""
    if any(
        not parameter.trainable for u in range(spec.num_units) for parameter in spec.parameters(u)
    ):
        if not wants_pretrained(config):
            initialize(model, seed=config.seed)
        else:
            folder = model_folder(config.model)
            assert folder is not None
            source = open_checkpoint(folder)
            fill_narrow(model, lambda name, _, slices: source.read(name, slices), device)
            for logical in model.logical_tensors():
                trained = logical.piece.parameter.trainable or is_adapter(logical.name)
                if not trained and not logical.view.is_meta:
                    logical.view.copy_(source.read(logical.name, logical.slices))
            source.drop()
    return model.eval().requires_grad_(False)


class HeldWeights:
    """What a run began with, of all that it trains; with adapters only theirs: they add nothing.

    Where all weights are trained this is a second copy of each rank's own, on the host.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._held = [piece.memory.detach().to("cpu", copy=True) for piece in self._pieces()]

    def _pieces(self) -> list[Piece]:
        return [piece for piece in kept_pieces(self._engine) if piece.kind is StateKind.WEIGHT]

    @contextmanager
    @torch.no_grad()
    def in_place(self) -> Iterator[None]:
        """Let the engine have the held weights for a while."""
        pieces = self._pieces()
        now = [piece.memory.detach().to("cpu", copy=True) for piece in pieces]
        for piece, held in zip(pieces, self._held, strict=True):
            piece.memory.copy_(held)
        self._engine.follow_masters()
        try:
            yield
        finally:
            for piece, mine in zip(self._pieces(), now, strict=True):
                piece.memory.copy_(mine)
            self._engine.follow_masters()
