"""The figures of a running job: taken on every rank, joined beside the next step, written by one.

When the host has issued a step, a chip is not yet through with it: its times are read when the next
one is issued, and travel to rank 0 while the one after that runs, so that measuring keeps nobody
waiting. All ranks do so, chips or not, for they gather in one order.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from tutti.comm import Communicator
from tutti.comm.work import Work
from tutti.diagnose.slow_parts import SlowParts
from tutti.errors import InputError
from tutti.hardware.wires import wire_of
from tutti.launch.secret import all_here
from tutti.models.flops import flops_per_token
from tutti.observe import slow_series
from tutti.observe.alert_watch import alert_watch
from tutti.observe.folder import METRICS, SERIES, TENSORBOARD
from tutti.observe.prometheus import Prometheus
from tutti.observe.rank_series import FILE, RankSeries
from tutti.observe.record import NUM_TIMES, RankTimes, StepRecord, by_pool
from tutti.observe.sinks import JsonLines, Sink, Sinks, TensorBoard, sink_of_others
from tutti.observe.slow_series import SlowSeries
from tutti.observe.trackers import MlFlow, WeightsAndBiases
from tutti.plan.plan import RankMap
from tutti.ranks.rank_places import class_of, compute_seconds
from tutti.schedule.instruction import Op, What
from tutti.schedule.schedule import Schedule
from tutti.simulate.estimate import Estimate
from tutti.train.engine.engine import Engine
from tutti.train.engine.gradient_noise import noise_scale
from tutti.train.engine.recorder import Readings
from tutti.train.engine.step_totals import StepResult
from tutti.train.run.claim import Home
from tutti.train.run.rank_context import RankContext
from tutti.train.sync.wire_times import WireTimes, wires_of


class Measure:
    """Takes, joins and writes the figures of steps."""

    def __init__(
        self, context: RankContext, engine: Engine, control: Communicator, predicted: Estimate
    ) -> None:
        self._context, self._engine, self._control = context, engine, control
        self._predicted = predicted
        plan, cluster = context.plan, context.job.cluster
        self._peak = cluster.peak_flops(plan.job.precision.compute, fallback=True)
        self._work = flops_per_token(context.spec, plan.job.sequence_length) * plan.job.tokens
        places = [engine.seats.map.place(rank) for rank in range(plan.num_ranks)]
        self._pools = [place.chip.pool for place in places]
        self._places = [(place.chip.pool, place.chip.node) for place in places]
        self._port: Prometheus | None = None
        self._taken: tuple[StepRecord, Readings, list[float]] | None = None
        # rank 0 writes a step when its times are there; if it is lost first, others know these
        self.recent: deque[StepRecord] = deque(maxlen=4)
        self._pending: tuple[StepRecord, Work] | None = None
        self._sinks: Sinks | None = None
        self._lines: JsonLines | None = None
        self._series: RankSeries | None = None
        self._home: Home | None = None
        self._slow: SlowParts | None = None
        self._slow_series: SlowSeries | None = None
        watches = context.led or bool(context.config.measure.alerts.every_s)
        self._wires = WireTimes(control) if watches else None
        self._engine.recorder.expect(expected_seconds(engine, predicted))

    def mfu(self, seconds: float) -> float:
        """Return the model FLOPs utilisation of a step, over all chips of the cluster."""
        return self._work / seconds / self._peak

    @contextmanager
    def sinks(self, *, after: int) -> Iterator[None]:
        """Open where figures go, on rank 0; a resumed run goes on after a step."""
        if self._context.rank != 0 or self._context.led:
            yield
            return
        self._sinks = Sinks(list(self._opened(after)))
        self._home = Home(self._context.config.folder)
        self._series = self._opened_series()
        self._watch_slow()
        try:
            yield
        finally:
            if self._slow_series is not None:
                self._slow_series.close()
            self._slow = self._slow_series = None
            if self._series is not None:
                self._series.close()
            self._series = None
            for record in self._unwritten():  # the others are gone, and their times with them
                self._sinks.write(record)
            self._sinks.close()
            self._home.close()
            self._sinks = self._lines = self._port = self._home = None

    def _opened_series(self) -> RankSeries | None:
        """Open where every rank's figures go; a folder that cannot be written is said."""
        context = self._context
        try:
            path = context.config.folder / SERIES / FILE
            return RankSeries(path, len(self._pools), say=context.warn)
        except (OSError, InputError) as error:
            context.warn(f"figures of ranks are not kept ({error})")
            return None

    def _watch_slow(self) -> None:
        """Look from now on which chips and wires become slow, where alerts are wanted."""
        context = self._context
        if self._wires is None:
            return
        ranks = RankMap(context.plan)
        chips = [ranks.place(rank).chip for rank in range(context.plan.num_ranks)]
        self._slow = SlowParts(
            compute_seconds(self._engine.seats, self._predicted),
            [str(chip) for chip in chips],
            [wire_of(context.job.cluster, chip) for chip in chips],
        )
        self._slow_series = SlowSeries(
            context.config.folder / SERIES / slow_series.FILE, say=context.warn
        )

    def _unwritten(self) -> list[StepRecord]:
        """Return the steps whose lines wait for the ranks' times."""
        waiting = [self._pending[0]] if self._pending is not None else []
        return waiting + ([self._taken[0]] if self._taken is not None else [])

    def _opened(self, after: int) -> Iterator[Sink]:
        config, measure = self._context.config, self._context.config.measure
        self._lines = JsonLines(config.folder / METRICS, after=after)
        yield self._lines
        if measure.tensorboard:
            yield TensorBoard(config.folder / TENSORBOARD)
        if measure.prometheus_port is not None:
            address = "127.0.0.1" if all_here(os.environ) else "0.0.0.0"
            self._port = Prometheus(
                measure.prometheus_port, address, places=self._places, folder=config.folder
            )
            yield self._port
        warn, plan = self._context.warn, self._context.plan
        watch = alert_watch(config.folder, measure.alerts, self._context.notice)
        if watch is not None:
            yield watch
        facts = {
            "model": plan.model.name, "cluster": plan.cluster.name, "ranks": plan.num_ranks,
            "global_batch": plan.job.global_batch, "sequence_length": plan.job.sequence_length,
            "precision": plan.job.precision.compute.value, "steps": config.steps,
            "seed": config.seed, **dataclasses.asdict(config.optimizer),
        }  # fmt: skip
        for name in measure.sinks:
            yield sink_of_others(name, config.folder, facts)
        if measure.wandb:
            yield WeightsAndBiases(
                measure.wandb, config.folder, mode=measure.wandb_mode, after=after, facts=facts,
                warn=warn,
            )  # fmt: skip
        if measure.mlflow:
            yield MlFlow(
                measure.mlflow, config.folder, uri=measure.mlflow_uri, after=after, facts=facts,
                warn=warn,
            )  # fmt: skip

    def record(
        self,
        number: int,
        result: StepResult,
        seconds: float,
        rate: float,
        sampled: Mapping[str, float] | None = None,
    ) -> StepRecord:
        """Return what is known of a step before the ranks' times are."""
        estimate = self._predicted
        compares = self._context.config.objective is not None and sampled is None
        if sampled is not None:
            sampled = {**sampled, "divergence": result.margin, "clipped": result.right}
        return StepRecord(
            step=number,
            loss=result.loss,
            balance=result.balance,
            gradient_norm=result.gradient_norm,
            learning_rate=rate,
            tokens=result.tokens,
            seconds=seconds,
            tokens_per_s=self._context.plan.job.tokens / seconds,
            mfu=self.mfu(seconds),
            hfu=self.mfu(seconds) * (estimate.hfu / estimate.mfu if estimate.mfu else 1.0),
            predicted_s=estimate.step_seconds,
            skipped=result.skipped,
            margin=result.margin if compares else None,
            right=result.right if compares else None,
            sampled=sampled,
            noise_scale=self._noise(result),
            at=time.time(),
        )

    def _noise(self, result: StepResult) -> float | None:
        """Return the gradient's noise scale in sequences, where a step's sums tell it."""
        given, engine = self._context.config.optimizer, self._engine
        scale = noise_scale(
            result.means, result.squares, updates=engine.step_number - (not result.skipped),
            beta1=given.beta1, beta2=given.beta2,
        )  # fmt: skip
        return None if scale is None else scale * self._context.plan.job.global_batch

    def step(self, record: StepRecord) -> None:
        """Take the figures of a step."""
        self._look_for_folder()
        if record.step % self._context.config.measure.every:
            return
        self.recent.append(record)
        self._send()
        wires = self._wires.take() if self._wires is not None else []
        self._taken = (record, self._engine.recorder.last, wires)
        if self._lines is not None:
            self._lines.soon(self._unwritten())

    def finish(self) -> None:
        """Write all steps that are left."""
        self._look_for_folder()
        self._send()
        self._write()

    def _look_for_folder(self) -> None:
        """Go on in a new folder where the run's own was moved away or deleted, and say so."""
        became = "" if self._home is None else self._home.lost()
        if not became:
            return
        context = self._context
        context.job.save()
        if self._lines is not None:
            self._lines.reopen()
        context.warn(
            f"{context.config.folder} {became} while the run writes in it: checkpoints and "
            "figures go on in a new folder of that name"
        )

    def _send(self) -> None:
        """Let the taken figures go their way, and write those that have arrived."""
        if self._taken is None:
            return
        (record, readings, wires), self._taken = self._taken, None
        times = self._engine.recorder.times(readings)
        own = torch.tensor([*times.values(), *wires], dtype=torch.float64)
        work = self._control.all_gather(own)
        self._write()
        self._pending = (record, work)

    def _write(self) -> None:
        """Write the step whose figures have arrived by now."""
        if self._pending is None:
            return
        record, work = self._pending
        self._pending = None
        everyone = work.wait().view(len(self._pools), -1)
        if self._context.rank != 0:
            return
        times = [RankTimes.of_values(values.tolist()) for values in everyone[:, :NUM_TIMES]]
        whole = dataclasses.replace(record, pools=by_pool(times, self._pools))
        compute = [own.compute_s for own in times]
        told = enumerate(everyone[:, NUM_TIMES:].tolist() if self._wires is not None else ())
        wires = [wire for rank, numbers in told for wire in wires_of(rank, numbers)]
        if self._context.led:
            self._context.events.send(
                "times", step=record.step, step_s=record.seconds, compute_s=compute, wires=wires
            )
        if self._slow is not None and self._slow_series is not None:
            for text in self._slow.step(record.step, record.seconds, compute, wires):
                self._context.say(text)
            self._slow_series.write(self._slow.chips, self._slow.wires, at=record.at)
        if self._sinks is not None:
            self._sinks.write(whole)
        if self._series is not None:
            self._series.write(times, at=record.at)
        if self._port is not None:
            self._port.ranks(times)
        self._context.events.send("step", **whole.to_document())

    def validation(self, step: int, loss: float) -> None:
        """Take a loss on held-out data; the steps before it are written first."""
        self.finish()
        if self._sinks is not None:
            self._sinks.validation(step, loss)
        if self._context.rank == 0:
            self._context.events.send("validation", step=step, loss=loss)


def expected_seconds(engine: Engine, estimate: Estimate) -> list[float]:
    """Return how long each instruction of a rank should take by itself.

    For a Receive that is the transfer, which the cost model counts at the sender.
    """
    schedule, place = engine.schedule, engine.seat.place
    costs = estimate.priced.costs.classes
    own = class_of(schedule, engine.seat)
    sends = _send_seconds(schedule, estimate)
    expected = []
    for entry, seconds in zip(engine.instructions, costs[own].seconds.tolist(), strict=True):
        if entry.op is Op.RECEIVE:
            seconds += sends.get((place.pipeline, entry.start, entry.what), 0.0)
        expected.append(seconds)
    return expected


def _send_seconds(schedule: Schedule, estimate: Estimate) -> dict[tuple[int, int, What], float]:
    slowest: dict[tuple[int, int, What], float] = {}
    for rank_class, costs in zip(schedule.classes, estimate.priced.costs.classes, strict=True):
        for entry, seconds in zip(rank_class.instructions, costs.seconds.tolist(), strict=True):
            if entry.op is Op.SEND:
                key = (rank_class.pipeline, entry.start, entry.what)
                slowest[key] = max(slowest.get(key, 0.0), seconds)
    return slowest
