"""Puts the pieces that ranks left of every step together to a dump that `tutti align` compares.

One tensor is in memory at a time. Keys are "step-2/loss", "step-2/gradient/3.mlp.up.weight" (mean
over the step's tokens, before clipping), "step-2/gradient_norm" and "step-2/weight/…" after the
update; "step-0/weight/…" are the weights that training began with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tutti.document import Place, build
from tutti.errors import InputError
from tutti.files import read_file
from tutti.huggingface.dtypes import BY_NAME
from tutti.huggingface.dumps import Batch, DumpFacts, DumpWriter
from tutti.train.run.planning import STEPS_FILE
from tutti.train.run.step_tensors import START, TOKENS, RunFacts, StepPiece, files_of_rank

_Found = tuple[Path, StepPiece]


def write_step_dump(folder: Path, target: Path, *, side: str) -> None:
    """Write the dump of a run whose ranks left their pieces in a folder."""
    path = folder / STEPS_FILE
    facts = build(RunFacts, read_file(path), Place(str(path)))
    pieces: dict[tuple[int, str, str], list[_Found]] = {}
    for rank in range(facts.ranks):
        for piece in _pieces(folder, rank):
            key = (piece[1].step, piece[1].what, piece[1].name)
            pieces.setdefault(key, []).append(piece)
    batch = Batch(tokens=np.load(folder / TOKENS), seed=facts.seed)
    with DumpWriter(target, _dump_facts(facts, batch, side), batch) as writer:
        for step in (START, *(each.step for each in facts.steps)):
            _write_step(writer, facts, step, pieces)


def _dump_facts(facts: RunFacts, batch: Batch, side: str) -> DumpFacts:
    return DumpFacts(
        side=side,
        model=facts.model,
        model_type=facts.model_type,
        model_hash=facts.model_hash,
        dtype=facts.dtype,
        device=f"{facts.ranks} {'rank' if facts.ranks == 1 else 'ranks'} of {facts.cluster}",
        sequences=facts.global_batch,
        length=facts.sequence_length,
        seed=facts.seed,
        batch_sha256=batch.sha256,
        steps=len(facts.steps),
        versions=facts.versions,
    )


def _write_step(
    writer: DumpWriter,
    facts: RunFacts,
    step: int,
    pieces: dict[tuple[int, str, str], list[_Found]],
) -> None:
    """Record a step in the order of its execution."""

    def tensors(what: str) -> None:
        for name, shape in facts.tensors.items():
            if (START, "weight", name) in pieces:
                key = f"step-{step}/{what}/{name}"
                parts = pieces.get((step, what, name), [])
                _record(writer, key, _assembled(key, shape, parts))

    if step == START:
        tensors("weight")
        return
    own = facts.steps[step - 1]
    if own.loss is not None:
        _record(writer, f"step-{step}/loss", np.array([own.loss], np.float32))
    _record(writer, f"step-{step}/updated", np.array([own.gradient_norm is not None], np.float32))
    if own.gradient_norm is not None:
        tensors("gradient")
        _record(writer, f"step-{step}/gradient_norm", np.array([own.gradient_norm], np.float32))
    tensors("weight")


def _record(writer: DumpWriter, key: str, numbers: NDArray[np.float32]) -> None:
    dtype = BY_NAME[str(numbers.dtype)]
    writer.record_raw(key, numbers.view(dtype.raw), dtype)


def _pieces(folder: Path, rank: int) -> Iterator[_Found]:
    numbers, listed = files_of_rank(folder, rank)
    if not listed.is_file() or not numbers.is_file():
        raise InputError(f"{folder}: rank {rank} has left nothing; copy the files of all ranks")
    with listed.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            yield numbers, build(StepPiece, json.loads(line), Place(f"{listed}:{number}"))


def _assembled(key: str, shape: tuple[int, ...], parts: list[_Found]) -> NDArray[np.float32]:
    """Return a tensor out of its pieces, which must cover it."""
    whole = np.zeros(shape, np.float32)
    covered = np.zeros(shape, np.bool_)
    for path, piece in parts:
        values = np.fromfile(path, np.float32, piece.count, offset=piece.offset)
        place = tuple(slice(low, high) for low, high in piece.intervals)
        for target, numbers in ((whole, values), (covered, np.ones(piece.count, np.bool_))):
            block = target[place].reshape(-1)  # a copy, or the memory itself
            block[piece.start : piece.start + piece.count] = numbers
            target[place] = block.reshape(target[place].shape)
    if not covered.all():
        missing = covered.size - int(covered.sum())
        raise InputError(f"'{key}': {missing:,} of {covered.size:,} numbers were left by no rank")
    return whole
