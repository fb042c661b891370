"""`Feeder`: the coming micro-batches of one rank, ready before they are asked for.

A thread reads and packs rows ahead, into pinned memory, a bounded number of micro-batches; the copy
to the device runs on the copy lane, and the compute lane waits for it, not the host. What goes
wrong in the thread is raised where the batch is asked for. `wait_s` is the time that asking took
because data were not ready.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tutti.accelerator import Accelerator
from tutti.accelerator.reference.preference_losses import Answers
from tutti.accelerator.reference.sampled_answers import SampledAnswers
from tutti.errors import InputError, TuttiError
from tutti.models.spec import ModelSpec
from tutti.nn.batch import Batch
from tutti.train.data.row import Row

Indices = Callable[[int, int], Sequence[int]]  # (step, micro-batch) → global samples
# weights and references of documents, and their device → what a loss on answers asks about
MakeAnswers = Callable[[Sequence[float], Sequence[float], torch.device], Answers]


class Samples(Protocol):
    """Rows by the number of the sample: a training order or validation rows."""

    def row(self, sample: int) -> Row:
        """Return the row of a global sample."""


class _Ready(NamedTuple):
    """A micro-batch in host memory."""

    step: int
    micro_batch: int
    both: Tensor  # tokens and targets, (2, T)
    lengths: tuple[tuple[int, ...], ...]  # of the documents of each row
    weights: tuple[float, ...] = ()  # of all documents; none: all one
    references: tuple[float, ...] = ()


def to_batch(
    spec: ModelSpec,
    accelerator: Accelerator,
    both: Tensor,
    lengths: Sequence[tuple[int, ...]],
    context: tuple[int, int] = (1, 0),
    like: Batch | None = None,
    *,
    weights: Sequence[float] = (),
    answers: Answers | SampledAnswers | None = None,
) -> Batch:
    """Copy tokens and targets to the device and make the batch of them.

    `context` is how many ranks share out each row, and which of them this one is; `like` is an
    earlier batch, whose positions serve again where they are the same. `weights` are those of the
    documents' tokens, `answers` a loss on whole documents instead.
    """
    on_device = torch.empty_like(both, device=accelerator.device)
    free, copied = accelerator.event(), accelerator.event()
    free.record()  # the memory may have been used by work that is still queued
    with accelerator.lane("copy"):
        free.wait()
        on_device.copy_(both, non_blocking=True)
        copied.record()
    copied.wait()
    documents = tuple(itertools.chain.from_iterable(lengths))
    row_length = both.shape[1] // len(lengths)
    weights_t = None
    if weights and answers is None:
        sizes = torch.tensor(documents)
        weights_t = accelerator.to_device(torch.tensor(weights).repeat_interleave(sizes))
    return Batch.of(
        spec,
        on_device[0],
        documents,
        targets_t=on_device[1],
        weights_t=weights_t,
        row_length=row_length,
        like=like,
        answers=answers,
    ).share(spec, *context)


def _each(
    rows: Sequence[Row], of: Callable[[Row], tuple[float, ...]], missing: float
) -> tuple[float, ...]:
    """Return a number of every document of some rows."""
    return tuple(value for row in rows for value in of(row) or (missing,) * len(row.lengths))


class Feeder:
    """Gives one rank its micro-batches, in any order within a step."""

    def __init__(
        self,
        samples: Samples,
        spec: ModelSpec,
        accelerator: Accelerator,
        indices: Indices,
        *,
        micro_batches: int,
        first_step: int = 0,
        last_step: int | None = None,  # the first that is not wanted
        depth: int = 4,
        context: tuple[int, int] = (1, 0),  # ranks that share out each row, and which this one is
        answers: MakeAnswers | None = None,  # with a loss on answers instead of tokens
    ) -> None:
        self.wait_s = 0.0
        self._context, self._answers = context, answers
        self._samples, self._spec, self._accelerator = samples, spec, accelerator
        self._indices, self._micro_batches = indices, micro_batches
        self._steps = range(first_step, last_step if last_step is not None else 1 << 62)
        self._queue: queue.Queue[_Ready | BaseException] = queue.Queue(depth)
        self._early: dict[tuple[int, int], _Ready] = {}
        self._failed: BaseException | None = None
        self._last: Batch | None = None  # that was given
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tutti-feeder", daemon=True)
        self._thread.start()

    # --- the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        coming = ((step, m) for step in self._steps for m in range(self._micro_batches))
        try:
            for step, micro_batch in coming:
                if not self._put(self._prepared(step, micro_batch)):
                    return
            self._put(InputError(f"data: no micro-batch behind step {self._steps.stop - 1}"))
        except BaseException as error:
            self._put(error)

    def _put(self, item: _Ready | BaseException) -> bool:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def _prepared(self, step: int, micro_batch: int) -> _Ready:
        rows = [self._row(sample) for sample in self._indices(step, micro_batch)]
        length = sum(len(row.tokens) for row in rows)
        both = self._accelerator.pinned((2, length), torch.int64)
        view = both.numpy()
        np.concatenate([row.tokens for row in rows], out=view[0])
        np.concatenate([row.targets for row in rows], out=view[1])
        answered = self._answers is not None
        weights: tuple[float, ...] = ()
        if answered or any(row.weights for row in rows):
            weights = _each(rows, lambda row: row.weights, 0.0 if answered else 1.0)
        references = _each(rows, lambda row: row.references, 0.0) if answered else ()
        lengths = tuple(row.lengths for row in rows)
        return _Ready(step, micro_batch, both, lengths, weights, references)

    def _row(self, sample: int) -> Row:
        try:
            return self._samples.row(sample)
        except TuttiError as error:
            raise InputError(f"data: sample {sample}: {error}") from error
        except Exception as error:
            raise TuttiError(f"data: sample {sample}: {type(error).__name__}: {error}") from error

    # --- the consumer ----------------------------------------------------------------------

    def batch(self, step: int, micro_batch: int) -> Batch:
        """Return a micro-batch on the device; each can be had once."""
        ready = self._early.pop((step, micro_batch), None) or self._wanted(step, micro_batch)
        like = self._last if self._context[0] == 1 else None
        answers = None
        if self._answers is not None:
            device = self._accelerator.device
            answers = self._answers(ready.weights, ready.references, device)
        self._last = to_batch(
            self._spec,
            self._accelerator,
            ready.both,
            ready.lengths,
            self._context,
            like,
            weights=ready.weights,
            answers=answers,
        )
        return self._last

    def step(self, step: int) -> Callable[[int], Batch]:
        """Return the micro-batches of a step, as the engine asks for them."""
        return lambda micro_batch: self.batch(step, micro_batch)

    def _wanted(self, step: int, micro_batch: int) -> _Ready:
        began = time.perf_counter()
        try:
            while True:
                if self._failed is not None:
                    raise self._failed
                item = self._next()
                if isinstance(item, BaseException):
                    self._failed = item
                elif (item.step, item.micro_batch) == (step, micro_batch):
                    return item
                else:
                    self._early[item.step, item.micro_batch] = item
                    if item.step > step:
                        raise ValueError(f"step {step}: micro-batch {micro_batch} was given before")
        finally:
            self.wait_s += time.perf_counter() - began

    def _next(self) -> _Ready | BaseException:
        while True:
            try:
                return self._queue.get(timeout=0.5)
            except queue.Empty:
                if self._stopped.is_set():
                    return ValueError("the feeder is closed")

    def close(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join()

    def __enter__(self) -> Feeder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
