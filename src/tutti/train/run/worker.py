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

from tutti.accelerator.reference.optimizer import (
    AdamSettings,
    AverageSettings,
    TensorSettings,
)
from tutti.errors import TuttiError
from tutti.models.distillation import Distillation
from tutti.observe.record import StepRecord
from tutti.ranks.devices import open_chip
from tutti.ranks.events import Events
from tutti.ranks.shutdown import Leaving, asking
from tutti.simulate.estimate import Estimate
from tutti.train.checkpoint import Processes, Progress
from tutti.train.data.feeder import Feeder, MakeAnswers, Samples
from tutti.train.data.open_data import PackedData
from tutti.train.engine.averages import averaged
from tutti.train.engine.engine import Batches, Engine
from tutti.train.engine.samples import sample_indices
from tutti.train.engine.step_totals import StepResult
from tutti.train.evaluation.on_rank import RankEvaluations
from tutti.train.run.answers import AnswerLoss, Order
from tutti.train.run.ask_reference import AskingRank
from tutti.train.run.build_rank import (
    Joined,
    build_engine,
    join,
    load_weights,
    open_checkpoints,
    open_job_data,
)
from tutti.train.run.culprit import find_culprit
from tutti.train.run.ending import Ended, History, finish
from tutti.train.run.measure import Measure
from tutti.train.run.planning import Job, notices
from tutti.train.run.rank_context import RankContext
from tutti.train.run.rings import open_ring, sample_host
from tutti.train.run.rollouts import Rollouts, find_rollouts
from tutti.train.run.safety import Built, explain_memory, hardware_differences
from tutti.train.run.starting import Resume
from tutti.train.run.step_tensors import StepTensors
from tutti.train.run.teaching import Teaching
from tutti.train.run.tracing import Tracer
from tutti.train.sync.comm_links import CommLinks

Load = Callable[["Worker"], Progress]  # fills the engine; says how far the run is
StepBatches = Callable[[int], Batches]

PAUSE = 1 << 20  # what a rank adds to the sum of signals to let all pause; stopping adds 1


class PausedError(Exception):
    """All ranks leave after a step, as asked; their state stays."""


class StopRequest:
    """Whether this rank was asked to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal = 0

    def ask(self, number: int) -> None:
        """Let the run end after the step at hand."""
        self.signal = self.signal or number


def run_worker(
    job: Job,
    rank: int,
    events: Events,
    *,
    resume: Resume,
    failed: Callable[[BaseException], None] = lambda _error: None,
) -> dict[str, Any]:
    """Train as one rank until the last step, or until asked to stop; return what it came to.

    `failed` hears of an error before anything is closed for it.
    """
    context = RankContext.of(job, rank, events)
    context.say("opening the chip")
    chip = job.cluster.pool(context.position.pool).chip
    accelerator = open_chip(chip, context.position.slot)
    for line in hardware_differences(accelerator, chip):
        context.warn(f"{context.name}: {line}")
    stop, built = StopRequest(), None
    with ExitStack() as stack:
        leaving = stack.enter_context(Leaving(rank, failed))
        stack.enter_context(asking(stop.ask))
        try:
            joined = join(context, accelerator, stack)
            context.say("building the model")
            predicted = job.predicted()
            links = CommLinks(joined.comm, job.plan, job.spec, job.cluster)
            built = (build_engine(context, accelerator, links, predicted), predicted)

            def load(worker: Worker) -> Progress:
                return load_weights(
                    context, worker.engine, worker.checkpointer, worker.data, resume
                )

            worker = Worker(context, joined, links, built, stop, stack, load=load)
            return worker.train()
        except torch.OutOfMemoryError as error:
            cause = TuttiError(explain_memory(error, context.seat, accelerator, built))
            leaving.tell(cause)
            raise cause from error
        except BaseException as error:
            leaving.tell(error)
            raise


class Worker:
    """A rank of a job that has met the others, from its first step to its end."""

    def __init__(
        self,
        context: RankContext,
        joined: Joined,
        links: CommLinks,
        built: Built,
        stop: StopRequest,
        stack: ExitStack,
        *,
        load: Load,
        data: PackedData | None = None,
        may_publish: Callable[[], None] = lambda: None,
    ) -> None:
        """Open data, saves and figures, and load the weights; the stack closes what is opened."""
        self.context, self.joined, self.stop = context, joined, stop
        self.engine: Engine = built[0]
        self.predicted: Estimate = built[1]
        self.measure = Measure(context, self.engine, joined.control, self.predicted)
        program = self.predicted.result.program
        self.tracer = Tracer(context, self.engine, links, joined.control, program)
        self.data = data or open_job_data(context, joined.saving)
        self.checkpointer = open_checkpoints(context, joined.saving, stack, may_publish)
        self.rollouts = self._rollouts(stack)
        self.evaluations = RankEvaluations(
            context, self.engine, joined.comm, self.feeder, self.data
        )
        self.answers = self._answers()
        how = context.config.distillation
        self.teaching = None if how is None else self._teaching(how)
        self.progress = load(self)
        self.evaluations.recall(self.progress.step)
        self.after_step: Callable[[], None] = lambda: None  # when a step is in the progress
        self.pausing = False  # asked to leave after a step, without an end
        self.history = History(first_step=self.progress.step)
        self._stack = stack
        self.engine.recorder.ring = open_ring(context, self.engine, self.progress.step, stack)
        sample_host(context, joined.comm, stack)

    def _answers(self) -> AnswerLoss | None:
        """Return how answers are compared, if they are; before the run's own weights are loaded."""
        objective = self.context.config.objective
        if objective is None or self.rollouts is not None:
            return None
        references = {}
        if objective.needs_reference:
            feed = AskingRank(self.context, self.engine, self.joined.saving, self.feeder)
            references = feed.references(self.data, objective)
        return AnswerLoss(objective, references)

    def _teaching(self, how: Distillation) -> Teaching:
        return Teaching(how, self.context, self.engine, self.joined.saving, self.data, self.feeder)

    def _rollouts(self, stack: ExitStack) -> Rollouts | None:
        """Return who samples answers, if the model is to learn from its own."""
        objective = self.context.config.objective
        if objective is None or not objective.is_sampled:
            return None
        coordinator = Processes(self.joined.comm, self.context.config.timeout_s, name="rollouts")
        made = find_rollouts()(self.context, self.engine, coordinator, self.data, stack)
        made.begin()
        return made

    def feeder(
        self, samples: Samples, first: int, last: int, answers: MakeAnswers | None = None
    ) -> Feeder:
        """Return what brings this rank its part of some steps."""
        plan, seat = self.context.plan, self.context.seat
        return Feeder(
            samples,
            self.context.spec,
            self.engine.accelerator,
            lambda step, m: sample_indices(plan, seat, step, m),
            micro_batches=plan.pipelines[seat.place.pipeline].micro_batches,
            context=(seat.replica.cp, seat.place.cp),
            first_step=first,
            last_step=last,
            depth=self.context.config.data.prefetch,
            answers=answers,
        )

    def steps(self, order: Order, first: int, last: int, stack: ExitStack) -> StepBatches:
        """Return the batches of some steps of an order, as they are trained on or evaluated."""
        given = self.answers
        if self.rollouts is not None:
            return self.rollouts.step
        if given is None:
            fed = stack.enter_context(self.feeder(order, first, last)).step
            return fed if self.teaching is None else self.teaching.steps(order, fed)
        own = stack.enter_context(
            self.feeder(given.samples(order), first, last, answers=given.make)
        )
        if not given.has_baseline:
            return own.step
        others = stack.enter_context(
            self.feeder(given.samples(order, other=True), first, last, answers=given.sums)
        )
        return lambda step: given.against(self.engine, own.step(step), others.step(step))

    def train(self) -> dict[str, Any]:
        """Train until the last step, or until asked to stop; return what it came to."""
        context, config, first = self.context, self.context.config, self.progress.step
        self._stack.enter_context(self.measure.sinks(after=first))
        self.tracer.announce(first, config.steps)
        kept = self._step_tensors()
        batches = self.steps(self.data.train, first, config.steps, self._stack)
        for line in notices(context.job) if context.rank == 0 else ():
            context.notice(line)
        history = self.history
        for step in range(first, config.steps) if not self.evaluations.is_over else ():
            if self._step(step, batches, history, kept):
                over = self.evaluations.is_over
                why = self.evaluations.why_over if over else "asked to stop"
                context.say(f"{why}: saving at step {step + 1}")
                break
        if kept is not None and history.losses and context.rank == 0:
            self._write_facts(kept, first)
        self.joined.meet()
        self.measure.finish()
        return finish(
            Ended(
                context=context,
                engine=self.engine,
                checkpointer=self.checkpointer,
                saving=self.joined.saving,
                progress=self.progress,
                history=history,
                stopped_by=self.stop.signal,
                early=self.evaluations.is_over,
                predicted_s=self.predicted.step_seconds,
                mfu=self.measure.mfu,
            )
        )

    def _step(
        self, step: int, batches: StepBatches, history: History, kept: StepTensors | None
    ) -> bool:
        """Make a step and whatever is due after it; tell whether some rank was asked to stop."""
        config, number = self.context.config, step + 1
        settings = self._settings(config.optimizer.rates(config.steps).at(number))
        traced = self.tracer.wants(number)
        self.engine.end.between(number)
        begin = time.perf_counter()
        self.engine.signal = bool(self.stop.signal) + PAUSE * self.pausing
        due = config.measure.noise_every
        self.engine.sums_moments = bool(due) and number % due == 0
        result = self.engine.step(batches(step), settings)
        seconds = time.perf_counter() - begin
        if self.rollouts is not None:  # what its batch took is told beside the step
            seconds -= self.rollouts.seconds
        self.engine.end.between()
        self._check(step, result)
        if kept is not None:
            kept.after_step()
        self.measure.step(self.advance(result, seconds))
        self.after_step()
        if traced:
            self.measure.finish()  # the steps up to this one are told before its trace
            self.tracer.step(number)
        self.checkpointer.poll()
        if config.validation.every and number % config.validation.every == 0:
            history.validation.append((number, self._validate(number)))
        taken = self.evaluations.take(number)
        if taken is not None:
            self.progress = dataclasses.replace(self.progress, validation_loss=taken[0])
        pauses, stops = divmod(result.signals, PAUSE)
        if pauses and not stops and number < config.steps:
            raise PausedError(f"all pause after step {number}")
        stopping = stops > 0 or self.evaluations.is_over
        best = taken is not None and taken[1]
        if (self._due(number) or best) and not stopping:
            self.joined.meet()
            self.measure.finish()  # a run that goes on from here has the figures before it
            self.checkpointer.save(self.engine, self.progress)
        return stopping

    def advance(self, result: StepResult, seconds: float) -> StepRecord:
        """Take a step that is in the state into progress; return what is known of it."""
        config = self.context.config
        self.history.add(result.loss, seconds)
        self._advance(result)
        rate = config.optimizer.rates(config.steps).at(self.progress.step)
        sampled = None if self.rollouts is None else self.rollouts.figures
        return self.measure.record(self.progress.step, result, seconds, rate, sampled)

    def _write_facts(self, kept: StepTensors, first: int) -> None:
        batch = self.context.plan.job.global_batch
        rows = range(first * batch, self.progress.step * batch)
        tokens = np.stack([self.data.train.row(sample).tokens for sample in rows])
        cluster = self.context.job.cluster.name
        kept.write_facts(tokens, seed=self.context.config.seed, cluster=cluster)

    def _step_tensors(self) -> StepTensors | None:
        """Open where every step's gradients and weights are kept, if that is wanted."""
        folder = self.context.config.measure.tensors
        if not folder:
            return None
        kept = StepTensors(self.engine, Path(folder))
        self._stack.callback(kept.close)
        return kept

    def _settings(self, rate: float) -> AdamSettings:
        """Return the optimizer's constants at a learning rate."""
        given, mean = self.context.config.optimizer, self.context.config.average
        return AdamSettings(
            learning_rate=rate, beta1=given.beta1, beta2=given.beta2, eps=given.epsilon,
            weight_decay=given.weight_decay, decay_vectors=given.decay_vectors,
            momentum=given.momentum,
            average=None if mean is None else AverageSettings(**dataclasses.asdict(mean)),
            tensors=tuple(
                TensorSettings(match=own.match, rate=own.rate, weight_decay=own.weight_decay)
                for own in given.tensors
            ),
        )  # fmt: skip

    def _check(self, step: int, result: StepResult) -> None:
        """Stop at numbers that are not finite, and say where they began."""
        if not result.skipped or self.engine.scaling.is_dynamic:
            return

        def again() -> None:
            with ExitStack() as stack:
                batches = self.steps(self.data.train, step, step + 1, stack)
                self.engine.step(batches(step), self._settings(0.0))

        alone = self.context.plan.num_ranks == 1
        gather = (lambda own: [own]) if alone else self.joined.control.gather_values
        raise TuttiError(find_culprit(self.engine, step, again, gather))

    def _advance(self, result: StepResult) -> None:
        samples = self.progress.samples + self.context.plan.job.global_batch
        self.progress = dataclasses.replace(
            self.progress,
            step=self.progress.step + 1,
            samples=samples,
            tokens=self.progress.tokens + result.tokens,
            data=dataclasses.asdict(self.data.state(samples)),
            validation_loss=None,
        )

    def _due(self, step: int) -> bool:
        config = self.context.config
        every = config.checkpoints.every
        return bool(every) and step % every == 0 and step < config.steps

    def _validate(self, step: int) -> float:
        rows = self.data.validation
        if rows is None:
            raise TuttiError(
                "validation.every is given, but the data hold nothing out: name "
                "data.validation, or data.holdout"
            )
        if self.rollouts is not None:
            return self._validated(
                step, self.rollouts.validate(self.context.config.validation.steps)
            )
        most = rows.num_steps(self.context.plan.job.global_batch)
        count = min(self.context.config.validation.steps, most)
        total, divisor = 0.0, 0
        with ExitStack() as stack:
            stack.enter_context(averaged(self.engine))
            batches = self.steps(rows, 0, count, stack)
            for number in range(count):
                answer = self.engine.evaluate(batches(number))
                total, divisor = total + answer.loss * answer.count, divisor + answer.count
        return self._validated(step, total / max(divisor, 1))

    def _validated(self, step: int, loss: float) -> float:
        """Take a validation loss into figures and progress."""
        self.measure.validation(step, loss)
        if math.isfinite(loss):
            self.progress = dataclasses.replace(self.progress, validation_loss=loss)
        return loss
