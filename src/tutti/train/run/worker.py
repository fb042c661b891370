"""One rank's work: open the chip, join the others, load, train, save."""

from __future__ import annotations

import dataclasses
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from tutti.accelerator.reference.optimizer import AdamSettings
from tutti.comm.connect import connect
from tutti.comm.places import place_of
from tutti.errors import TuttiError
from tutti.nn.initialize import initialize
from tutti.schedule.instruction import Instruction
from tutti.simulate.estimate import Estimate
from tutti.train.checkpoint import (
    Checkpointer,
    CheckpointSettings,
    Processes,
    Progress,
    export_hf,
    find_latest,
    load_hf,
)
from tutti.train.closing import StepResult
from tutti.train.comm_links import CommLinks
from tutti.train.data.feeder import Feeder, Samples
from tutti.train.data.opening import PackedData, open_data
from tutti.train.engine import Engine
from tutti.train.graphs import CaptureSettings
from tutti.train.run.devices import open_chip
from tutti.train.run.events import Events
from tutti.train.run.measure import Measure
from tutti.train.run.planning import Job, notices
from tutti.train.run.rendezvous import agree, facts, open_store
from tutti.train.run.safety import (
    check_arithmetic,
    explain_memory,
    find_culprit,
    hardware_differences,
)
from tutti.train.run.samples import sample_indices
from tutti.train.run.step_tensors import StepTensors
from tutti.train.run.tracing import Tracer
from tutti.train.run.weights import model_folder, wants_pretrained
from tutti.train.seats import Seats, class_of

CHECKPOINTS, EXPORT = "checkpoints", "huggingface"


class Worker:
    """A rank of a job, from its start to its end."""

    def __init__(self, job: Job, rank: int, events: Events) -> None:
        self.job, self.rank, self.events = job, rank, events
        self.config, self.plan, self.spec = job.config, job.plan, job.spec
        self.world = job.plan.num_ranks
        self.seat = Seats(job.plan, job.spec)[rank]
        self.position = self.seat.place.chip
        self._stop = False

    def run(self, *, resume: bool) -> dict[str, Any]:
        """Train until the last step, or until asked to stop; return what it came to."""
        self._say("opening the chip")
        chip = self.job.cluster.pool(self.position.pool).chip
        self.accelerator = open_chip(chip, self.position.slot)
        for line in hardware_differences(self.accelerator, chip):
            self.events.send("warning", text=f"rank {self.rank} ({self.position}): {line}")
        with ExitStack() as stack:
            stack.enter_context(self._signals())
            try:
                self._join(stack)
                self._build()
                self._load(stack, resume=resume)
                return self._train(stack)
            except torch.OutOfMemoryError as error:
                raise TuttiError(explain_memory(self, error)) from error

    def _say(self, text: str) -> None:
        self.events.send("say", text=text)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Let SIGTERM and Ctrl-C end the run after the step at hand."""

        def ask(number: int, frame: FrameType | None) -> None:
            del number, frame
            self._stop = True

        before = {s: signal.signal(s, ask) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # --- the start -------------------------------------------------------------------------

    def _join(self, stack: ExitStack) -> None:
        self._say("waiting for the other ranks")
        timeout_s = self.config.timeout_s
        store = open_store(timeout_s)
        agree(store, self.rank, self.world, facts(self.job), timeout_s)
        dist.init_process_group(
            "gloo",
            store=PrefixStore("control", store),
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=timeout_s),
        )
        stack.callback(dist.destroy_process_group)
        self.saving = Processes()
        self.comm = connect(
            PrefixStore("comm", store),
            self.rank,
            self.world,
            place=place_of(self.job.cluster, self.position),
            accelerator=self.accelerator,
            timeout_s=timeout_s,
        )
        stack.callback(self.comm.close)

    def _build(self) -> None:
        self._say("building the model")
        self.predicted: Estimate = self.job.predicted()
        self.engine = Engine(
            self.plan,
            self.spec,
            self.rank,
            self.accelerator,
            CommLinks(self.comm, self.plan, self.spec),
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

    def _load(self, stack: ExitStack, *, resume: bool) -> None:
        self.data: PackedData = self._open_data()
        folder = model_folder(self.config.model)
        saves = self.config.checkpoints
        self.checkpointer = Checkpointer(
            self.config.folder / CHECKPOINTS,
            CheckpointSettings(
                keep_last=saves.keep,
                keep_every=saves.keep_every or None,
                asynchronous=saves.asynchronous,
            ),
            self.saving,
            model_folder=folder,
            say=self._say,
        )
        stack.callback(self.checkpointer.close)
        if resume:
            self._say("reading the checkpoint")
            self.progress = self.checkpointer.load(self.engine)
            self._check_data()
            return
        if self.rank == 0 and find_latest(self.config.folder / CHECKPOINTS) is not None:
            self.events.send(
                "warning",
                text=f"{self.config.folder} holds checkpoints of an earlier run; this one starts "
                "anew, --resume would go on",
            )
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
            raise TuttiError(
                f"rank {other} has other data than rank 0; give all nodes the same files"
            )
        return data

    def _check_data(self) -> None:
        """Refuse to go on with other samples than the run would have had."""
        batch, step = self.plan.job.global_batch, self.progress.step
        if self.progress.samples != step * batch:
            before = self.progress.samples / max(step, 1)
            raise TuttiError(
                f"the checkpoint's run had a global batch of {before:g}, the plan has {batch}; go "
                "on with a plan of the same batch, or begin anew in another output folder"
            )
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
            self.engine.signal = self._stop
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
                self.checkpointer.save(self.engine, self.progress)
            if stopping:
                self._say(f"asked to stop: saving at step {step + 1}")
                break
        if kept is not None and losses and self.rank == 0:
            last = self.progress.step * self.plan.job.global_batch
            rows = range(first * self.plan.job.global_batch, last)
            tokens = np.stack([self.data.train.row(sample).tokens for sample in rows])
            kept.write_facts(tokens, seed=config.seed, cluster=self.job.cluster.name)
        return self._finish(first, losses, validation, seconds)

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
        return loss

    # --- the end ---------------------------------------------------------------------------

    def _finish(
        self,
        first: int,
        losses: list[float],
        validation: list[tuple[int, float]],
        seconds: list[float],
    ) -> dict[str, Any]:
        self.measure.finish()
        saves, exported = self.config.checkpoints, None
        done = self.progress.step >= self.config.steps
        if losses and (saves.final or not done):
            self.checkpointer.save(self.engine, self.progress)
            self.checkpointer.wait()
            if done and saves.huggingface and self.rank == 0:
                exported = self._export()
        self.saving.broadcast((True,))
        steady = statistics.median(seconds[1:] or seconds) if seconds else 0.0
        tokens = self.plan.job.tokens / steady if steady else 0.0
        latest = find_latest(self.config.folder / CHECKPOINTS)
        return {
            "steps": self.progress.step,
            "first_step": first,
            "losses": losses,
            "validation": validation,
            "seconds_per_step": steady,
            "tokens_per_s": tokens,
            "mfu": self.measure.mfu(steady) if steady else 0.0,
            "predicted_s": self.predicted.step_seconds,
            "checkpoint": None if latest is None else str(latest),
            "huggingface": exported,
        }

    def _export(self) -> str | None:
        """Write the Hugging Face folder, in place of an older one of this run."""
        import shutil

        target = self.config.folder / EXPORT
        self._say(f"writing {target}")
        fresh = target.with_name(f".{EXPORT}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            export_hf(self.config.folder / CHECKPOINTS, fresh)
        except TuttiError as error:
            self.events.send("warning", text=f"no Hugging Face folder: {error}")
            return None
        shutil.rmtree(target, ignore_errors=True)
        os.replace(fresh, target)
        return str(target)
