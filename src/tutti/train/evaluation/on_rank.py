"""A rank's part of evaluations during a run: all ranks ask together, under the job's plan."""

from __future__ import annotations

from collections.abc import Mapping

from tutti.comm import Communicator
from tutti.train.checkpoint import Processes
from tutti.train.data.open_data import PackedData
from tutti.train.engine.engine import Engine
from tutti.train.evaluation.during import Evaluations, keep, open_evaluations, recall
from tutti.train.evaluation.rows import item_logps
from tutti.train.evaluation.tasks import EvaluationTask
from tutti.train.run.ask_reference import Feed
from tutti.train.run.rank_context import RankContext


class RankEvaluations:
    """The tasks of a job, if it has some."""

    def __init__(
        self,
        context: RankContext,
        engine: Engine,
        comm: Communicator,
        feed: Feed,
        data: PackedData,
    ) -> None:
        self._context, self._engine, self._feed = context, engine, feed
        self.evaluations: Evaluations | None = None
        given = context.config.evaluate
        if given is not None:  # ranks talk in a group of their own: a save may be under way
            self._asking = Processes(comm, name="evaluation")
            longest = context.plan.job.sequence_length
            self.evaluations = open_evaluations(given, data.tokenizer, context.spec.vocab, longest)

    @property
    def is_over(self) -> bool:
        """Whether figures have not become better for too long."""
        return self.evaluations is not None and self.evaluations.is_over

    @property
    def why_over(self) -> str:
        """What a person reads of that."""
        assert self.evaluations is not None
        return f"{self.evaluations.figure} was no better for {self.evaluations.worse} evaluations"

    def recall(self, step: int) -> None:
        """Take up what the run wrote before it is gone on with."""
        if self.evaluations is not None:
            folder = self._context.config.folder
            recall(self.evaluations, folder, step, lambda text: self._asking.broadcast((text,))[0])

    def take(self, number: int) -> tuple[float, bool] | None:
        """Take the tasks that are due after a step.

        Return the figure by which checkpoints are compared, lower is better, and whether one is to
        be written: it is the best so far.
        """
        given, config = self.evaluations, self._context.config
        if given is None or not given.due(number, config.steps):
            return None
        figures = given.take(number, self._ask)
        if self._context.rank == 0:
            keep(given, config.folder)
            self._context.say(given.line(number, figures))
        return given.loss(figures), given.improved and number < config.steps

    def _ask(self, task: EvaluationTask) -> Mapping[str, float]:
        return task.figures(item_logps(self._engine, self._feed, self._asking, task.items))
