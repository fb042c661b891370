"""Runs that save and load, with ranks as threads: what the checkpoint tests have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.threads import ThreadLinks, World
from tests.support.training import batch_of, first_index, settings
from tutti.accelerator import open_accelerator
from tutti.models.spec import ModelSpec
from tutti.nn.batch import Batch
from tutti.nn.initialize import initialize
from tutti.plan.factored_means import mean_shapes
from tutti.plan.plan import Plan
from tutti.train.checkpoint import Checkpointer, CheckpointSettings, Progress
from tutti.train.checkpoint.contents import StateKind, kept_pieces
from tutti.train.engine.engine import Engine

SYNCHRONOUS = CheckpointSettings(asynchronous=False)


class ThreadCoordinator:
    """A coordinator over the threads of a world; each rank makes one at the same point."""

    def __init__(self, links: ThreadLinks) -> None:
        # a rank of its own in the meetings, so that those of training are not counted with these
        self._links = ThreadLinks(links.world, links.rank)
        self.rank, self.size = links.rank, links.world.size
        self._number = 0

    def _all(self, value: Any) -> list[Any]:
        self._number += 1
        place, _ = self._links.world.meetings["checkpoint", self._number]
        with self._links.world.lock:
            place[self.rank] = value
            self._links.world.lock.notify_all()
            self._links.world.until(lambda: len(place) == self.size, f"meeting {self._number}")
            return [place[rank] for rank in range(self.size)]

    def gather(self, value: Any) -> list[Any] | None:
        everything = self._all(value)
        return everything if self.rank == 0 else None

    def broadcast(self, value: Any) -> Any:
        return self._all(value)[0]


class Run:
    """One rank of a run on a plan."""

    def __init__(self, links: ThreadLinks, plan: Plan, folder: Path, **options: Any) -> None:
        spec = plan.model.spec
        assert spec is not None
        self.plan, self.spec, self.links = plan, spec, links
        self.engine = Engine(plan, spec, links.rank, open_accelerator("cpu"), links, clip_norm=1.0)
        self.lines: list[str] = []
        self.checkpointer = Checkpointer(
            folder,
            options.pop("settings", SYNCHRONOUS),
            ThreadCoordinator(links),
            say=self.lines.append,
            **options,
        )

    def begin(self, seed: int = 1) -> None:
        initialize(self.engine.model, seed=seed, deviation=0.1)
        self.engine.take_masters()

    def train(self, steps: int) -> list[float]:
        return train(self.engine, steps)

    def save(self, **fields: Any) -> None:
        self.checkpointer.save(self.engine, Progress(step=self.engine.step_number, **fields))


def train(engine: Engine, steps: int) -> list[float]:
    """Go on for some steps; return the losses."""
    losses = []
    for _ in range(steps):
        step = engine.step_number

        def batches(micro_batch: int, step: int = step) -> Batch:
            first = first_index(engine.plan, engine.seat, micro_batch)
            indices = range(first, first + engine.seat.replica.sequences)
            whole = batch_of(engine.spec, step, indices, engine.plan.job.sequence_length)
            return whole.share(engine.spec, engine.seat.replica.cp, engine.seat.place.cp)

        losses.append(engine.step(batches, settings()).loss)
    return losses


def run(plan: Plan, folder: Path, work: Callable[[Run], Any], **options: Any) -> list[Any]:
    """Do something on every rank of a plan."""
    return World(plan.num_ranks).run(lambda links: work(Run(links, plan, folder, **options)))


def kept(engine: Engine) -> list[tuple[str, tuple[slice, ...], Tensor]]:
    """Copies of all that a rank keeps; what tied copies only carry along is left out."""
    return [
        (piece.key, piece.rectangle.slices, piece.memory.clone())
        for piece in kept_pieces(engine)
        if not (piece.copy and piece.kind is not StateKind.WEIGHT)
    ]


def whole(spec: ModelSpec, ranks: list[list[tuple[str, tuple[slice, ...], Tensor]]]) -> dict:
    """Put the ranks' pieces together; copies must agree and nothing may be missing."""
    shapes = {
        f"{unit}.{p.name}": p.shape for unit in range(spec.num_units) for p in spec.parameters(unit)
    }
    found: dict[str, Tensor] = {}
    for key, slices, value in (piece for rank in ranks for piece in rank):
        kind, _, name = key.partition("/")
        shape = mean_shapes(shapes[name]).get(kind, shapes[name])
        nothing = torch.full(shape, float("nan"), dtype=value.dtype)
        tensor = found.setdefault(key, nothing)
        old = tensor[slices]
        assert torch.equal(old[~old.isnan()], value[~old.isnan()]), f"ranks disagree on {key}"
        tensor[slices] = value
    assert not any(tensor.isnan().any() for tensor in found.values())
    return found
