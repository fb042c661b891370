"""Copies in the host's memory, taken after every step, are what the engine keeps at that moment."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from tests.support.checkpointing import Run, run
from tests.unit.train.checkpoint.test_any_plan import DENSE, SPARSE, of_job
from tutti.plan.plan import Plan
from tutti.train.checkpoint import Progress
from tutti.train.checkpoint.contents import KeptPieces, kept_pieces
from tutti.train.elastic.held_state import HeldState
from tutti.train.elastic.host_copies import HostCopies, labelled, read_copy

PLANS = {
    "level 3": of_job(DENSE["levels 2 and 3, pipelines that shard inside"], "fp32"),
    "bf16": of_job(DENSE["interleaved, owned by the head"], "bf16"),
    "experts": of_job(SPARSE["experts shared out unequally"], "fp32", batch=4),
    "moments in 8 bits": of_job(DENSE["one chip"], "bf16", optimizer="adamw8bit"),
}


def newest(folder: Path, chip: str) -> HeldState:
    _, _, _, label = max((c for c in labelled(folder) if c[0] == chip), key=lambda c: c[2])
    return read_copy(label)


@pytest.mark.parametrize("name", PLANS)
def test_a_copy_is_what_the_engine_keeps(name: str, tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()

    def work(one: Run) -> None:
        one.begin()
        chip = f"p/{one.links.rank}/0"
        copies = HostCopies(tmp_path / "memory", chip, 1)
        for step in (1, 2, 3):
            one.train(1)
            copies.take(one.engine, Progress(step=step, samples=0))
            copies.wait()
            found = newest(tmp_path / "memory", chip)
            assert found.step == step
            assert copies.whole[-1] == (1, step)
            due = {(p.key, p.rectangle): p.memory for p in kept_pieces(one.engine) if not p.copy}
            assert due.keys() == {(piece.key, piece.rectangle) for piece in found.pieces}
            for piece in found.pieces:
                assert torch.equal(piece.memory, due[piece.key, piece.rectangle])

    run(PLANS[name], tmp_path / "run", work)


def test_pieces_are_made_anew_only_where_their_memory_is_another(tmp_path: Path) -> None:
    def work(one: Run) -> None:
        one.begin()
        kept = KeptPieces(one.engine)
        first = kept.now()
        one.train(1)
        assert kept.now() is first
        optimizer = one.engine.parameters.all_states()[0].optimizer
        assert optimizer.mean is not None
        optimizer.mean = optimizer.mean.clone()
        memory = {piece.memory.data_ptr() for piece in kept.now()}
        assert memory == {piece.memory.data_ptr() for piece in kept_pieces(one.engine)}

    run(plain(), tmp_path, work)


def plain() -> Plan:
    return of_job(DENSE["one chip"], "fp32")


def test_copies_do_not_keep_an_engine_that_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()

    def work(one: Run) -> None:
        one.begin()
        one.train(1)
        copies = HostCopies(tmp_path / "memory", "p/0/0", 1)
        copies.take(one.engine, Progress(step=1, samples=0))
        copies.wait()
        engine = weakref.ref(one.engine)
        del one.engine
        gc.collect()
        assert engine() is not None
        copies.forget_engine()
        gc.collect()
        assert engine() is None
        assert newest(tmp_path / "memory", "p/0/0").step == 1

    run(plain(), tmp_path / "run", work)
