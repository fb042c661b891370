"""Pipeline stages: each rank holds some units of a model, and all ranks run the same scheduler.

Every rank is given the same requests and makes the same steps. A step's stream goes from stage to
stage; the last one samples and tells the others what came, so that all schedulers go on alike. The
place of each rank is a Plan's: stages may have unlike numbers of layers and of tensor-parallel
ranks. Of one worker one step is under way at a time; several workers of a rank (`lanes`) keep all
stages busy, each in its turn on all ranks alike.
"""

from __future__ import annotations

import io
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tutti.accelerator import Accelerator
from tutti.batching.prices import Prices
from tutti.batching.settings import Settings
from tutti.batching.step import Step
from tutti.errors import InputError
from tutti.huggingface import open_checkpoint
from tutti.models import ModelSpec
from tutti.nn import Batch, Model, Ranks, load
from tutti.nn.quantised import load_quantised
from tutti.plan.plan import Plan
from tutti.ranks.links import Handle, Links
from tutti.ranks.rank_places import Seat, Seats
from tutti.serve.handover.handed import Handover
from tutti.serve.handover.sender import KeySender
from tutti.serve.inputs import Given
from tutti.serve.loading import DTYPES, Sizes, end_tokens, settings_for
from tutti.serve.pacing import StagePace
from tutti.serve.worker import Launched, StepResult, Worker

STREAM, RESULTS = "stream", "results"
UNSENT = 4  # messages that are not waited for: those before them were read by now


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlace:
    """Where a rank stands in a pipeline that serves."""

    seat: Seat
    before: int | None  # the rank whose stream it gets; None: the first stage
    after: tuple[int, ...]  # the ranks that get its stream
    teller: int  # the rank that says what was sampled
    listeners: tuple[int, ...]  # those that have no head
    everybody: tuple[int, ...]

    @property
    def is_last(self) -> bool:
        """Whether it has the head."""
        return self.seat.rank not in self.listeners


def stage_place(plan: Plan, spec: ModelSpec, rank: int) -> StagePlace:
    """Return a rank's place; a plan that is no placement for serving is refused."""
    _check(plan)
    seats = Seats(plan, spec)
    stages = [tuple(seats.of_stage(0, s)) for s in range(len(plan.pipelines[0].stages))]
    seat = seats[rank]
    number, tp = seat.place.stage, seat.place.tp
    before = None
    if number:
        earlier = stages[number - 1]
        before = earlier[tp % len(earlier)].rank
    after: tuple[int, ...] = ()
    if number + 1 < len(stages):
        own, later = len(stages[number]), stages[number + 1]
        after = tuple(s.rank for s in later if s.place.tp % own == tp)
    return StagePlace(
        seat=seat,
        before=before,
        after=after,
        teller=stages[-1][0].rank,
        listeners=tuple(s.rank for stage in stages[:-1] for s in stage),
        everybody=tuple(range(seats.num_ranks)),
    )


def _check(plan: Plan) -> None:
    wanted = (
        "a placement for serving has one pipeline, one replica of each stage and whole ranges of "
        "units; plan it so"
    )
    if len(plan.pipelines) > 1:
        raise InputError(f"plan: {len(plan.pipelines)} pipelines; {wanted}")
    for number, stage in enumerate(plan.pipelines[0].stages):
        replica = stage.replicas[0]
        problem = None
        if stage.num_replicas > 1:
            problem = f"{stage.num_replicas} replicas"
        elif len(stage.units) > 1:
            problem = f"{len(stage.units)} ranges of units (interleaved)"
        elif replica.cp > 1:
            problem = f"context parallelism over {replica.cp} ranks"
        elif replica.sequence_parallel or replica.tp_overlap_chunks > 1:
            problem = "sequence parallelism or overlapped products"
        if problem is not None:
            raise InputError(f"plan: stage {number} has {problem}; {wanted}")


def open_stage(
    folder: Path | str,
    plan: Plan,
    rank: int,
    links: Links,
    accelerator: Accelerator,
    *,
    dtype: str = "fp32",
    sizes: Sizes | None = None,
) -> StageWorker:
    """Return this rank's worker: its own units of a folder's model, and pages for them."""
    model, place = load_stage(folder, plan, rank, links, accelerator, dtype=DTYPES[dtype])
    end = end_tokens(Path(folder), model.spec)
    return stage_worker(model, place, links, accelerator, sizes or Sizes(), end)


def load_stage(
    folder: Path | str,
    plan: Plan,
    rank: int,
    links: Links,
    accelerator: Accelerator,
    *,
    dtype: torch.dtype,
    weights: str | None = None,
) -> tuple[Model, StagePlace]:
    """Return a rank's own units with their numbers; `weights`: to which they are rounded."""
    checkpoint = open_checkpoint(folder, quantised=True)
    place = stage_place(plan, checkpoint.spec, rank)
    stored = getattr(checkpoint, "method", None)
    narrow = stored is not None or weights is not None
    device = torch.device("meta") if narrow else accelerator.device
    model = stage_model(checkpoint.spec, place, links, accelerator, dtype, device)
    if narrow:
        load_quantised(model, checkpoint, accelerator.device, None if stored else weights)
    else:
        load(model, checkpoint)
    checkpoint.drop()
    return model.eval().requires_grad_(False), place


def stage_model(
    spec: ModelSpec,
    place: StagePlace,
    links: Links,
    accelerator: Accelerator,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> Model:
    """Return the units of a rank, without numbers."""
    seat = place.seat
    options: dict[str, Any] = {}
    if seat.tensor.size > 1:
        options["tensor"] = links.group(seat.tensor.ranks)
    if seat.expert_counts:
        options |= {
            "experts": links.group(seat.experts.ranks),
            "expert_counts": seat.expert_counts,
        }
    return Model(
        spec,
        accelerator.operators,
        units=seat.units,
        parallel=Ranks(**options),
        dtype=dtype,
        device=accelerator.device if device is None else device,
    )


def stage_worker(
    model: Model,
    place: StagePlace,
    links: Links,
    accelerator: Accelerator,
    sizes: Sizes,
    end: tuple[int, ...] = (),
) -> StageWorker:
    """Return a worker with as many pages as all ranks have room for."""
    model.eval().requires_grad_(False)
    dtype = next(model.parameters()).dtype
    settings = settings_for(model.spec, sizes, accelerator, dtype, model)
    agreed = settings
    if len(place.everybody) > 1:
        most = torch.tensor([-settings.pages, -settings.host_pages])
        most = links.group(place.everybody).all_reduce(most, maximum=True)
        pages, host_pages = (-int(count) for count in most)
        agreed = replace(settings, pages=pages, host_pages=host_pages, ahead=1)
    return StageWorker(
        model, accelerator, agreed, dtype=dtype, codes=sizes.codes, end=end, place=place,
        links=links,
    )  # fmt: skip


class StageWorker(Worker):
    """Runs steps together with the workers of other stages."""

    def __init__(
        self,
        model: Model,
        accelerator: Accelerator,
        settings: Settings,
        *,
        dtype: torch.dtype,
        place: StagePlace,
        links: Links,
        codes: torch.dtype | None = None,
        end: tuple[int, ...] = (),
    ) -> None:
        super().__init__(model, accelerator, settings, dtype=dtype, codes=codes, end=end)
        # streams travel between the stages
        self._capturable = self._capturable and len(place.everybody) == 1
        self._place, self._links, self._dtype = place, links, dtype
        self._sent: deque[Handle] = deque()  # what may still be on its way
        self._step: Step | None = None  # the one that is computed
        self.pace: StagePace | None = None
        self.sender: KeySender | None = None
        self.planned: Prices | None = None  # what the plan says of steps: the same on all ranks

    def prices(self, *, guesses: bool = False) -> Prices | None:
        """Return what steps take: of several ranks what all of them know alike."""
        if len(self._place.everybody) > 1 or self.planned is not None:
            return self.planned
        return super().prices(guesses=guesses)

    def launch(self, step: Step) -> Launched:
        """Compute this stage's part of a step; the last one tells what it sampled at once."""
        self._step = step
        if self.pace is not None and self._place.before is None:
            self.pace.begin()
        launched = super().launch(step)
        if self._place.is_last and (self._place.listeners or self.pace is not None):
            launched.result = super().finish(launched)
            launched.download = None
            if self.pace is not None:
                self.pace.end(step)
            self._tell(launched.result)
        return launched

    def finish(self, launched: Launched) -> StepResult:
        """Wait for a step's tokens; every rank gets them."""
        if self._place.is_last:
            return super().finish(launched)
        return self._heard(launched.step, launched.result)

    def _begin(self, step: Step) -> None:
        super()._begin(step)
        if self.sender is not None:  # pages that were on the host are back by now
            self.sender.begin(step, self._handed_over(step))

    def _handed_over(self, step: Step) -> list[tuple[int, Handover, int]]:
        """Return the rows whose keys and values go elsewhere, with their prompts' lengths."""
        leaving = []
        for row, name in enumerate(step.sequences.tolist()):
            handover = self._work[name].handover
            if handover is not None:
                leaving.append((row, handover, len(self._sequences[name].request.prompt)))
        return leaving

    def _stream(self, batch: Batch) -> Tensor:
        place, x = self._place, None
        if place.before is not None:
            shape = (batch.num_tokens, self.model.spec.hidden)
            x = torch.empty(shape, dtype=self._dtype, device=self.accelerator.device)
            self._links.exchange((), ((place.before, x),), STREAM).wait()
            if self.pace is not None:
                self.pace.begin()
        y, _ = self.model.stream(x, batch)
        if place.after:
            if self.pace is not None and self._step is not None:
                self.pace.end(self._step)
            self._send([(rank, y) for rank in place.after], STREAM)
        return y

    def _send(self, sends: list[tuple[int, Tensor]], channel: str) -> None:
        """Send without waiting, but for what was sent some steps ago: it has arrived since."""
        self._sent.append(self._links.exchange(sends, (), channel))
        while len(self._sent) > UNSENT:
            self._sent.popleft().wait()

    def flush(self) -> None:
        """Wait until the others have all that was sent: who ends before them does this first."""
        while self._sent:
            self._sent.popleft().wait()

    def _extras(self, step: Step, x: Tensor, batch: Batch, result: StepResult) -> None:
        if self._place.is_last:
            super()._extras(step, x, batch, result)

    def _sampled(
        self, step: Step, given: Given, x: Tensor, batch: Batch, rows: Tensor, result: StepResult
    ) -> tuple[Tensor, Tensor] | None:
        if not self._place.is_last:
            return None
        return super()._sampled(step, given, x, batch, rows, result)

    def _culprit(self, step: Step, failed: np.ndarray) -> str:
        if len(self._place.everybody) == 1:
            return super()._culprit(step, failed)
        return "a module of one of the stages"  # to find it all of them would have to run again

    def _tell(self, result: StepResult) -> None:
        """Say what was sampled to those that have no head."""
        place = self._place
        if place.seat.rank == place.teller and place.listeners:
            packed = torch.from_numpy(np.frombuffer(_packed(result), np.uint8).copy())
            size = torch.tensor([len(packed)])
            self._send([(rank, size) for rank in place.listeners], RESULTS)
            self._send([(rank, packed) for rank in place.listeners], RESULTS)

    def _heard(self, step: Step, result: StepResult) -> StepResult:
        """Return what the last stage found."""
        place, links = self._place, self._links
        size = torch.zeros(1, dtype=torch.int64)
        links.exchange((), ((place.teller, size),), RESULTS).wait()
        packed = torch.zeros(int(size), dtype=torch.uint8)
        links.exchange((), ((place.teller, packed),), RESULTS).wait()
        final = _unpacked(packed.numpy().tobytes(), result.number)
        if len(step.sample_slots):
            slots = torch.from_numpy(step.sample_slots.astype(np.int64)).to(self._last.device)
            self._last[slots] = torch.from_numpy(final.tokens).long().to(self._last.device)
            self.sampler.noted(step.sample_slots.tolist(), final.tokens.tolist())
        return final


def _packed(result: StepResult) -> bytes:
    """Return a result as bytes: arrays by name, nothing that could be run."""
    arrays: dict[str, np.ndarray] = {
        "tokens": result.tokens,
        "ends": result.ends,
        "culprit": np.array(result.culprit),
    }
    for place, why in result.failures.items():
        arrays[f"failure/{place}"] = np.array(why)
    for index, array in enumerate(result.logprobs or ()):
        arrays[f"logprobs/{index}"] = array
    for name, logprobs in result.prompt_logprobs.items():
        arrays |= {f"prompt/{name}/{index}": array for index, array in enumerate(logprobs)}
    for name, states in result.pooled.items():
        arrays[f"pooled/{name}"] = states.numpy()
    stream = io.BytesIO()
    np.savez(stream, **arrays)  # type: ignore[arg-type]
    return stream.getvalue()


def _unpacked(packed: bytes, number: int) -> StepResult:
    arrays = np.load(io.BytesIO(packed), allow_pickle=False)

    def three(prefix: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return arrays[f"{prefix}/0"], arrays[f"{prefix}/1"], arrays[f"{prefix}/2"]

    prompts = {int(name.split("/")[1]) for name in arrays.files if name.startswith("prompt/")}
    pooled = {int(name.split("/")[1]) for name in arrays.files if name.startswith("pooled/")}
    failures = [name for name in arrays.files if name.startswith("failure/")]
    return StepResult(
        number=number,
        tokens=arrays["tokens"],
        ends=arrays["ends"],
        logprobs=three("logprobs") if "logprobs/0" in arrays.files else None,
        prompt_logprobs={name: three(f"prompt/{name}") for name in prompts},
        pooled={name: torch.from_numpy(arrays[f"pooled/{name}"]) for name in pooled},
        culprit=str(arrays["culprit"]),
        failures={int(name.split("/")[1]): str(arrays[name]) for name in failures},
    )
