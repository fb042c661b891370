"""One rank's work: open the chip, join the others, load, train, save."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tutti.accelerator.reference.optimizer import AdamSettings
from tutti.comm.connect import connect
from tutti.comm.entry.store import PrefixedStore
from tutti.comm.places import place_of
from tutti.errors import InputError, TuttiError
from tutti.nn.initialize import initialize
from tutti.observe.folder import CHECKPOINTS
from tutti.ranks import rendezvous
from tutti.ranks.devices import open_chip
from tutti.ranks.events import Events
from tutti.ranks.leaving import Leaving, asking
from tutti.ranks.rank_places import Seats, class_of
from tutti.schedule.instruction import Instruction
from tutti.simulate.estimate import Estimate
from tutti.train.checkpoint import (
    Checkpointer,
    CheckpointSettings,
    Processes,
    Progress,
    load_hf,
)
from tutti.train.data.feeder import Feeder, Samples
from tutti.train.data.opening import PackedData, open_data
from tutti.train.engine.engine import Engine
from tutti.train.engine.step_totals import StepResult
from tutti.train.graphs.captured_blocks import CaptureSettings
from tutti.train.run.agreement import job_facts
from tutti.train.run.culprit import find_culprit
from tutti.train.run.ending import finish
from tutti.train.run.measure import Measure
from tutti.train.run.planning import Job, notices
from tutti.train.run.safety import check_arithmetic, explain_memory, hardware_differences
from tutti.train.run.samples import sample_indices
from tutti.train.run.starting import Resume, check_batch, which_checkpoint
from tutti.train.run.step_tensors import StepTensors
from tutti.train.run.tracing import Tracer
from tutti.train.run.weights import model_folder, wants_pretrained
from tutti.train.sync.comm_links import CommLinks


class Worker:
    """A rank of a job, from its start to its end."""

    def __init__(
        self,
        job: Job,
        rank: int,
        events: Events,
        failed: Callable[[BaseException], None] = lambda _error: None,
    ) -> None:
        self.job, self.rank, self.events = job, rank, events
        self._failed = failed  # hears of an error before anything is closed for it
        self.config, self.plan, self.spec = job.config, job.plan, job.spec
        self.world = job.plan.num_ranks
        self.seat = Seats(job.plan, job.spec)[rank]
        self.position = self.seat.place.chip
        self.stopped_by = 0  # the signal that asked this rank to stop

    def run(self, *, resume: Resume) -> dict[str, Any]:
        """Train until the last step, or until asked to stop; return what it came to."""
        self._say("opening the chip")
        chip = self.job.cluster.pool(self.position.pool).chip
        self.accelerator = open_chip(chip, self.position.slot)
        for line in hardware_differences(self.accelerator, chip):
            self.events.send("warning", text=f"rank {self.rank} ({self.position}): {line}")
        with ExitStack() as stack:
            leaving = stack.enter_context(Leaving(self.rank, self._failed))
            stack.enter_context(asking(self._ask_to_stop))
            try:
                self._join(stack)
                self._build()
                self._load(stack, resume=resume)
                return self._train(stack)
            except torch.OutOfMemoryError as error:
                cause = TuttiError(explain_memory(self, error))
                leaving.tell(cause)
                raise cause from error
            except BaseException as error:
                leaving.tell(error)
                raise

    def _say(self, text: str) -> None:
        self.events.send("say", text=text)

    def _ask_to_stop(self, number: int) -> None:
        """Let the run end after the step at hand."""
        self.stopped_by = self.stopped_by or number

    # --- the start -------------------------------------------------------------------------

    def _join(self, stack: ExitStack) -> None:
        self._say("waiting for the other ranks")
        rendezvous.tell_of_strangers(lambda text: self.events.send("stranger", text=text))
        timeout_s = self.config.timeout_s
        store = rendezvous.open_store(timeout_s)
        facts = job_facts(self.job)
        rendezvous.agree(store, self.rank, self.world, facts, timeout_s)
        self.comm = connect(
            PrefixedStore("comm", store),
            self.rank,
            self.world,
            place=place_of(self.job.cluster, self.position),
            accelerator=self.accelerator,
            profile=self.job.chip_profiles(),
            timeout_s=timeout_s,
            start_timeout_s=timeout_s,
            secret=rendezvous.job_secret(),
            stranger=rendezvous.name_stranger,
        )
        stack.callback(self.comm.close)
        self.control = self.comm.control("control")
        self.saving = Processes(self.comm)

    def _build(self) -> None:
        self._say("building the model")
        self.predicted: Estimate = self.job.predicted()
        self.links = CommLinks(self.comm, self.plan, self.spec, self.job.cluster)
        self.engine = Engine(
            self.plan,
            self.spec,
            self.rank,
            self.accelerator,
            self.links,
            clip_norm=self.config.optimizer.clip_norm,
            durations=self._durations(),
            stub=self.config.emulate == "stub",
            capture=self._capture(),
        )
        if not getattr(self.accelerator, "mode", ""):  # emulated chips calculate on the host
            check_arithmetic(self)
        self.measure, self.tracer = Measure(self), Tracer(self)

    def _capture(self) -> CaptureSettings:
        """Return what is wanted of graphs, and the memory that the plan leaves for them."""
        promised = self.predicted.memory[class_of(self.predicted.schedule, self.seat)].total
        room = int(self.accelerator.memory().total - promised)
        return CaptureSettings(mode=self.config.capture, room_bytes=room, say=self._say)

    def _durations(self) -> Callable[[Instruction], float | None] | None:
        """Return what a chip on declared time takes: what the cost model says."""
        if getattr(self.accelerator, "mode", "") != "declared":
            return None
        rank_class = class_of(self.predicted.schedule, self.seat)
        costs = self.predicted.priced.costs.classes[rank_class]
        entries = self.predicted.schedule.classes[rank_class].instructions
        table = dict(zip(entries, costs.seconds.tolist(), strict=True))
        return table.__getitem__

    def _load(self, stack: ExitStack, *, resume: Resume) -> None:
        self.data: PackedData = self._open_data()
        folder = model_folder(self.config.model)
        saves = self.config.checkpoints
        self.checkpointer = Checkpointer(
            self.config.folder / CHECKPOINTS,
            CheckpointSettings(
                keep_last=saves.keep,
                keep_every=saves.keep_every or None,
                keep_best=saves.keep_best,
                missing=saves.missing,
                asynchronous=saves.asynchronous,
            ),
            self.saving,
            model_folder=folder,
            say=self._say,
        )
        stack.callback(self.checkpointer.close)
        if resume is not False:
            self._say("reading the checkpoint")
            self.progress = self.checkpointer.load(self.engine, which_checkpoint(resume))
            self._check_data()
            return
        self.progress = Progress(seed=self.config.seed)
        if wants_pretrained(self.config):
            assert folder is not None
            self._say(f"reading the weights of {folder}")
            load_hf(self.engine, folder)
        else:
            self._say("making random weights")
            initialize(self.engine.model, seed=self.config.seed)  # type: ignore[arg-type]
            self.engine.take_masters()

    def _open_data(self) -> PackedData:
        """Open the data; the first rank of each node tokenises what nobody has yet."""
        self._say("opening the data")
        data = open_data(
            self.config.data,
            sequence_length=self.plan.job.sequence_length,
            vocabulary=self.spec.vocab,
            model_folder=model_folder(self.config.model),
        )
        for report in data.reports if self.rank == 0 else ():
            self._say(str(report))
        found = self.saving.gather(data.fingerprint)
        if found is not None and len(set(found)) > 1:
            other = next(i for i, text in enumerate(found) if text != found[0])
            raise InputError(
                f"rank {other} has other data than rank 0; give all nodes the same files"
            )
        return data

    def _check_data(self) -> None:
        """Refuse to go on with other samples than the run would have had."""
        check_batch(self.progress, self.plan.job.global_batch)
        saved = dict(self.progress.data)
        if saved:
            self.data.check(self.data.state(self.progress.samples).__class__(**saved))  # type: ignore[arg-type]

    # --- the loop --------------------------------------------------------------------------

    def feeder(self, samples: Samples, first: int, last: int) -> Feeder:
        """Return what brings this rank its part of some steps."""
        seat, pipeline = self.engine.seat, self.plan.pipelines[self.engine.seat.place.pipeline]
        return Feeder(
            samples,
            self.spec,
            self.accelerator,
            lambda step, m: sample_indices(self.plan, seat, step, m),
            micro_batches=pipeline.micro_batches,
            context=(seat.replica.cp, seat.place.cp),
            first_step=first,
            last_step=last,
            depth=self.config.data.prefetch,
        )

    def _train(self, stack: ExitStack) -> dict[str, Any]:
        config, first = self.config, self.progress.step
        rates = config.optimizer.rates(config.steps)
        stack.enter_context(self.measure.sinks(after=first))
        self.tracer.announce(first, config.steps)
        kept = self._step_tensors(stack)
        feeder = stack.enter_context(self.feeder(self.data.train, first, config.steps))
        for line in notices(self.job) if self.rank == 0 else ():
            self.events.send("notice", text=line)
        losses: list[float] = []
        validation: list[tuple[int, float]] = []
        seconds: list[float] = []
        for step in range(first, config.steps):
            settings = self.settings(rates.at(step + 1))
            begin = time.perf_counter()
            self.engine.signal = bool(self.stopped_by)
            result = self.engine.step(feeder.step(step), settings)
            seconds.append(time.perf_counter() - begin)
            self._check(step, result)
            if kept is not None:
                kept.after_step()
            losses.append(result.loss)
            self._advance(result)
            self.measure.step(step + 1, result, seconds[-1], settings.learning_rate)
            self.tracer.step(step + 1)
            self.checkpointer.poll()
            if config.validation.every and (step + 1) % config.validation.every == 0:
                validation.append((step + 1, self._validate(step + 1)))
            stopping = result.signals > 0
            if self._due(step + 1) and not stopping:
                self._meet()
                self.measure.finish()  # a run that goes on from here has the figures before it
                self.checkpointer.save(self.engine, self.progress)
            if stopping:
                self._say(f"asked to stop: saving at step {step + 1}")
                break
        if kept is not None and losses and self.rank == 0:
            last = self.progress.step * self.plan.job.global_batch
            rows = range(first * self.plan.job.global_batch, last)
            tokens = np.stack([self.data.train.row(sample).tokens for sample in rows])
            kept.write_facts(tokens, seed=config.seed, cluster=self.job.cluster.name)
        self._meet()
        return finish(self, first, losses, validation, seconds)

    def _meet(self) -> None:
        """Make sure that all ranks are there: what waits for a save does not say who is not."""
        if self.world > 1:
            self.comm.barrier().wait()

    def _step_tensors(self, stack: ExitStack) -> StepTensors | None:
        """Open where every step's gradients and weights are kept, if that is wanted."""
        if not self.config.measure.tensors:
            return None
        kept = StepTensors(self.engine, Path(self.config.measure.tensors))
        stack.callback(kept.close)
        return kept

    def settings(self, rate: float) -> AdamSettings:
        """Return the optimizer's constants at a learning rate."""
        given = self.config.optimizer
        return AdamSettings(
            learning_rate=rate,
            beta1=given.beta1,
            beta2=given.beta2,
            eps=given.epsilon,
            weight_decay=given.weight_decay,
            decay_vectors=given.decay_vectors,
        )

    def _check(self, step: int, result: StepResult) -> None:
        """Stop at numbers that are not finite, and say where they began."""
        if result.skipped and not self.engine.scaling.is_dynamic:
            raise TuttiError(find_culprit(self, step))

    def _advance(self, result: StepResult) -> None:
        samples = self.progress.samples + self.plan.job.global_batch
        state = self.data.state(samples)
        self.progress = dataclasses.replace(
            self.progress,
            step=self.progress.step + 1,
            samples=samples,
            tokens=self.progress.tokens + result.tokens,
            data=dataclasses.asdict(state),
            validation_loss=None,
        )

    def _due(self, step: int) -> bool:
        every = self.config.checkpoints.every
        return bool(every) and step % every == 0 and step < self.config.steps

    def _validate(self, step: int) -> float:
        rows = self.data.validation
        if rows is None:
            raise TuttiError(
                "validation.every is given, but the data hold nothing out: name "
                "data.validation, or data.holdout"
            )
        most = rows.num_steps(self.plan.job.global_batch)
        count = min(self.config.validation.steps, most)
        total, tokens = 0.0, 0
        with self.feeder(rows, 0, count) as feeder:
            for number in range(count):
                found = self.engine.evaluate(feeder.step(number))
                total, tokens = total + found.loss * found.tokens, tokens + found.tokens
        loss = total / max(tokens, 1)
        self.measure.validation(step, loss)
        if math.isfinite(loss):
            self.progress = dataclasses.replace(self.progress, validation_loss=loss)
        return loss
