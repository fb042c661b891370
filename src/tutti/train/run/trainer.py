"""`Trainer`: a training job in Python, on this machine's chips or as a rank under torchrun.

trainer = tutti.Trainer.from_pretrained("my-model", cluster="laptop")
trainer.fit("corpus/*.jsonl", steps=100)
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any

from tutti.document import Place, build
from tutti.errors import InputError, StoppedError
from tutti.optional_imports import library
from tutti.plan.plan import Plan
from tutti.ranks.local_capacity import require_chips_here
from tutti.ranks.local_processes import LocalRanks, RankEvent
from tutti.search.question.effort import Report, silent
from tutti.train.data.config import DataConfig, SourceConfig
from tutti.train.data.rows_in_memory import rows_file, tokenizer_of
from tutti.train.run.config import TrainConfig
from tutti.train.run.planning import Job, prepare, prepared
from tutti.train.run.result import TrainResult, result_of
from tutti.train.run.starting import Resume, check_inputs, check_resumed, take_folder

if TYPE_CHECKING:
    from tutti.train.elastic.job import ElasticRun

Listener = Callable[[RankEvent], object]  # True: end after the step at hand
TrainingData = (
    str | os.PathLike[str] | Iterable[str | os.PathLike[str] | Mapping[str, Any]] | DataConfig
)


class Trainer:
    """One training job."""

    def __init__(self, config: TrainConfig, *, plan: Plan | None = None) -> None:
        self.config, self._plan = config, plan
        self.job: Job | None = None

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        cluster: str | os.PathLike[str] = "here",
        plan: Plan | str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> Trainer:
        """Return a trainer for a Hugging Face model folder.

        `options` are the keys of a training file, such as `steps=100`, `output="out/run"` or
        `job={"global_batch": 64}`.
        """
        written = {"model": os.fspath(folder), "cluster": os.fspath(cluster), **options}
        written.setdefault("data", {"train": [{"kind": "synthetic"}]})
        given = plan if isinstance(plan, Plan) else None
        if plan is not None and given is None:
            written["plan"] = os.fspath(plan)  # type: ignore[arg-type]
        return cls(build(TrainConfig, written, Place("Trainer")), plan=given)

    def prepare(self, report: Report = silent) -> Job:
        """Return the job with its plan, searched if need be; once."""
        if self.job is None:
            if self._plan is not None:
                self.job = prepared(self.config, self._plan)
            else:
                self.job = prepare(self.config, report)
        return self.job

    def fit(
        self,
        data: TrainingData | None = None,
        *,
        steps: int | None = None,
        resume: Resume = False,
        overwrite: bool = False,
        listener: Listener | None = None,
        port: int | None = None,
    ) -> TrainResult:
        """Train; under torchrun as one rank, otherwise on processes of this machine.

        `data` are paths, a `DataConfig`, or rows: mappings with the fields of a file's records, in
        a list, a `datasets.Dataset` or any iterable. `resume` goes on with the run in the output
        folder, from its newest checkpoint or from that of a step; `overwrite` begins anew over it.
        A rank that was asked to end before the last step raises `StoppedError`, so that its
        launcher knows.
        """
        config = self.config
        if data is not None:
            config = replace(config, data=_data(data, config))
        if steps is not None:
            config = replace(config, steps=steps)
        if config is not self.config:
            self.config = config
            if self.job is not None:
                self.job = replace(self.job, config=config)
        from tutti.ranks.launcher_variables import started_as_rank

        if started_as_rank(os.environ):
            from tutti.train.run.rank import run_rank, start_together

            start = start_together(
                config, resume=resume, overwrite=overwrite, make=lambda _: self.prepare()
            )
            try:
                result = run_rank(start.job, resume=start.resume)
            finally:
                start.release()
            result.require_finished()
            return result
        return run_local(
            self.prepare(), resume=resume, overwrite=overwrite, listener=listener, port=port
        )


def _data(data: TrainingData, config: TrainConfig) -> DataConfig:
    """Return data as a training file has them; rows are written where all ranks find them."""
    if isinstance(data, DataConfig):
        return data
    if isinstance(data, (str, os.PathLike)):
        data = [os.fspath(data)]
    given = list(data)
    if not given:
        raise InputError("fit: the data are empty; give paths, or rows such as {'text': …}")
    if all(isinstance(one, (str, os.PathLike)) for one in given):
        paths = [os.fspath(one) for one in given]  # type: ignore[arg-type]
        return replace(config.data, train=build(DataConfig, {"train": paths}, Place("fit")).train)
    path = rows_file(given, config.folder)
    tokenizer = tokenizer_of(given, config.data.tokenizer)
    return replace(config.data, train=(SourceConfig(path=str(path)),), tokenizer=tokenizer)


def run_local(
    job: Job,
    *,
    resume: Resume = False,
    overwrite: bool = False,
    listener: Listener | None = None,
    port: int | None = None,
    environment: dict[int, dict[str, str]] | None = None,
) -> TrainResult:
    """Run all ranks of a job on this machine and return what it came to."""
    elsewhere = job.config.elastic is not None and bool(job.config.elastic.listen)
    if not environment and not elsewhere:  # otherwise the caller has placed the ranks
        require_chips_here(job.plan, job.cluster, os.environ)
    check_inputs(job.config, resume, overwrite=overwrite)
    check_resumed(job, resume)
    held = take_folder(
        job.config.folder, job.config.checkpoints.to, overwrite=overwrite, fresh=resume is False
    )
    try:
        if held.note and listener is not None:
            listener(RankEvent(0, "warning", {"text": held.note}))
        if job.config.elastic is not None:
            for name in ("zmq", "msgspec"):
                library(name, "elastic", "elastic")
            from tutti.train.elastic.check_elastic import check_elastic
            from tutti.train.elastic.job import ElasticRun

            check_elastic(job)
            job.save()
            run = ElasticRun(job, resume=resume, listener=listener, environment=environment)
            with _stopping(run):
                summary = run.run()
            asked_by = run.asked_by
        else:
            ranks = LocalRanks(
                job.save(),
                job.plan.num_ranks,
                port=port,
                resume=resume,
                environment=environment or {},
                claim=held.descriptor,
            )
            summary, asked_by = _summary_of(ranks, listener), ranks.asked_by
    finally:
        held.release()
    return result_of(summary, job, asked_by=asked_by)


def _summary_of(ranks: LocalRanks, listener: Listener | None) -> dict[str, Any]:
    """Run ranks to their end; return what the first one says that it came to."""
    summary: dict[str, Any] | None = None
    with _stopping(ranks):
        try:
            ranks.start()
            for event in ranks.events():
                if event.kind == "done" and event.rank == 0:
                    summary = dict(event.values)
                ends = listener is not None and listener(event) is True
                if ends and not ranks.asked_by:  # twice would end them at once
                    ranks.ask_to_stop()
        finally:
            ranks.end()
    if summary is None:
        by = ranks.asked_by or signal.SIGTERM
        raise StoppedError("the run was stopped before it had begun", by=by)
    return summary


@contextmanager
def _stopping(ranks: LocalRanks | ElasticRun) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM ask the ranks to save and end; a second one ends them at once."""
    if threading.current_thread() is not threading.main_thread():  # others get no signals
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        del frame
        ranks.ask_to_stop(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
