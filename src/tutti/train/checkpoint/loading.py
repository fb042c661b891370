"""Fills an engine from a checkpoint folder or from a model's weights, under any plan.

Only what the rank keeps is read: masters and moments. Parameters then follow their masters, but
for those that are gathered at the start of a step (levels 1 to 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from tutti.errors import InputError
from tutti.models.tuning import is_adapter
from tutti.nn.initialize import DEVIATION, begin_magnitudes, first_factor, normal
from tutti.nn.quantised import fill_narrow
from tutti.ownership.rectangles import Rectangle
from tutti.train.checkpoint.contents import MOST_PIECE_BYTES, Piece, StateKind, kept_pieces
from tutti.train.checkpoint.manifest import Manifest
from tutti.train.checkpoint.places import CheckpointFiles, FolderFiles
from tutti.train.checkpoint.sharing import SharedReads
from tutti.train.checkpoint.storage import (
    METADATA,
    Stored,
    Target,
    parse_metadata,
    read_into,
    read_shared,
)

if TYPE_CHECKING:
    from tutti.huggingface import Checkpoint
    from tutti.train.engine.engine import Engine


Missing = Literal["error", "zero"]  # what a checkpoint lacks: refused, or begun at zero


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedState:
    """What a rank fills from a checkpoint."""

    stored: Mapping[str, Stored]
    targets: Mapping[str, list[Target]]
    notes: list[str]  # what a person should know of it, a line each
    begins_average: bool = False  # the weights' mean is not there: it begins as they are


@torch.no_grad()
def prepare_state(
    engine: Engine, files: CheckpointFiles, manifest: Manifest, missing: Missing = "error"
) -> WantedState:
    """Look up where weights and moments are; what the checkpoint lacks is said."""
    stored = parse_metadata(files.place, files.read(METADATA, manifest.files), manifest.files)
    notes: dict[str, None] = {}  # ordered, each once
    targets: dict[str, list[Target]] = {}
    begins_average = False
    for piece in kept_pieces(engine):
        if piece.copy and piece.kind is not StateKind.WEIGHT:
            piece.memory.zero_()  # the owner's end has them
            continue
        if piece.key not in stored and piece.kind is StateKind.AVERAGE:
            notes[f"checkpoint {files.name}: no mean of weights in it; it begins at them"] = None
            begins_average = True
            continue
        if piece.key not in stored:
            if piece.kind is StateKind.WEIGHT:
                raise InputError(f"{files.place}: holds no weights of '{piece.name}'")
            if missing == "error":
                raise InputError(
                    f"{files.place}: holds no {piece.kind}s of '{piece.name}' (it was saved under "
                    f"{manifest.optimizer}); to begin them at zero, give --set "
                    "checkpoints.missing=zero"
                )
            piece.memory.zero_()
            notes[f"checkpoint {files.name}: no {piece.kind}s in it; they begin at zero"] = None
            continue
        saved = stored[piece.key]
        if saved.dtype != piece.memory.dtype:
            notes[_conversion(files.name, piece, saved)] = None
        targets.setdefault(piece.key, []).append((piece.rectangle, piece.memory))
    return WantedState(
        stored=stored, targets=targets, notes=list(notes), begins_average=begins_average
    )


@torch.no_grad()
def fill_state(
    engine: Engine,
    files: CheckpointFiles,
    wanted: WantedState,
    shared: SharedReads | None = None,
) -> int:
    """Fill weights and moments; with `shared`, ranks read for each other.

    Return the bytes that this rank read from the storage.
    """
    if shared is None and isinstance(files, FolderFiles):
        num_bytes = read_into(files.folder, wanted.stored, wanted.targets)
    else:
        shared = shared or SharedReads(None)
        read_shared(files, shared, wanted.stored, wanted.targets)
        num_bytes = shared.read_bytes
    if wanted.begins_average:
        begin_averages(engine)
    engine.follow_masters()
    return num_bytes


@torch.no_grad()
def load_weights(engine: Engine, source: Checkpoint, *, seed: int = 0) -> None:
    """Fill an engine with a model's weights, as a run begins: no moments, step 0.

    Adapters and a reward model's score, which the model does not have, begin by the seed.
    """
    wanted = engine.spec.untuned.fingerprint
    as_scores = engine.spec.head.scores and not source.spec.head.scores
    held = source.spec.with_scores() if as_scores else source.spec
    if held.fingerprint != wanted:
        raise InputError(
            f"{source.folder}: holds a {source.spec.name} that differs from the planned "
            f"{engine.spec.name}; plan again for this folder"
        )
    score = f"{engine.spec.head_unit}.score.weight"
    parameter = engine.spec.parameters(engine.spec.head_unit)[-1]
    fill_narrow(
        engine.model, lambda name, _, slices: source.read(name, slices), engine.accelerator.device
    )
    for piece in kept_pieces(engine, most_bytes=MOST_PIECE_BYTES, frozen=True):
        if is_adapter(piece.name) and piece.kind is StateKind.WEIGHT:
            continue
        if piece.kind is StateKind.WEIGHT and as_scores and piece.name == score:
            drawn = normal(seed, score, parameter, piece.rectangle.slices)
            piece.memory.copy_(drawn * DEVIATION)
        elif piece.kind is StateKind.WEIGHT:
            piece.memory.copy_(source.read(piece.name, piece.rectangle.slices))
            source.drop()
        else:
            piece.memory.zero_()
    if engine.spec.tuning is not None and engine.spec.tuning.adapter is not None:
        begin_adapters(engine, seed)
    begin_averages(engine)
    engine.follow_masters()
    engine.step_number = 0


@torch.no_grad()
def begin_averages(engine: Engine) -> None:
    """Let the mean of the weights, if one is kept, be the weights as they are."""
    for state in engine.parameters.all_states():
        if state.optimizer.average is not None:
            state.optimizer.average.copy_(state.read_kept(0, state.num_kept))


@torch.no_grad()
def begin_adapters(engine: Engine, seed: int) -> None:
    """Fill the adapters of an engine whose frozen weights are there: they add nothing yet."""
    held = {t.name: t for t in engine.model.logical_tensors() if is_adapter(t.name)}
    for logical in held.values():
        logical.view.copy_(first_factor(seed, logical))
    begin_magnitudes(engine.model)
    for piece in kept_pieces(engine):
        if piece.name in held and piece.kind is StateKind.WEIGHT:
            logical = held[piece.name]
            starts = tuple(cut.start for cut in logical.slices)
            sizes = tuple(cut.stop - cut.start for cut in logical.slices)
            inner = piece.rectangle.within(Rectangle(starts, sizes))
            piece.memory.copy_(logical.view[inner.slices])


def _conversion(name: str, piece: Piece, stored: Stored) -> str:
    saved, kept = (
        str(dtype).removeprefix("torch.") for dtype in (stored.dtype, piece.memory.dtype)
    )
    exact = torch.promote_types(stored.dtype, piece.memory.dtype) == piece.memory.dtype
    how = "widened" if exact else "rounded"
    return f"checkpoint {name}: {piece.kind}s saved as {saved} are {how} to {kept} here"
