"""One rank's engine: runs its instruction list, step after step.

The list comes from the Plan and is the one that the simulator prices. Compute runs in the list's
order; what goes over the network or to the host is started in order and waited for by what depends
on it. Nothing with a cost happens outside an instruction, and on a chip the host only issues: what
the step came to is read when all of it, the optimizer included, is on its way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from tutti.accelerator.accelerator import Accelerator
from tutti.accelerator.reference.optimizer import AdamSettings
from tutti.models.spec import ModelSpec
from tutti.nn.batch import Batch
from tutti.nn.model import Model
from tutti.ownership.buckets import make_buckets, tied_apart
from tutti.plan.plan import Plan
from tutti.ranks.links import DONE, Done, Handle, Links
from tutti.ranks.rank_places import Seat, Seats, class_of
from tutti.schedule.instruction import Instruction, Lane, Op, What
from tutti.schedule.schedule import Schedule, build_schedule
from tutti.train.engine.boundary_exchange import Boundaries
from tutti.train.engine.evaluation import Evaluation, EvaluationResult
from tutti.train.engine.gradient_noise import moment_sums
from tutti.train.engine.loss_scaling import LossScaling
from tutti.train.engine.model_groups import EngineContext
from tutti.train.engine.passes import Passes
from tutti.train.engine.recompute import SelectiveOperators
from tutti.train.engine.recorder import Recorder
from tutti.train.engine.step_end import StepEnd
from tutti.train.engine.step_totals import (
    LateSums,
    StepResult,
    counts_of,
    gradient_factor,
    joined,
)
from tutti.train.engine.stub_passes import StubPasses
from tutti.train.graphs.captured_blocks import CaptureSettings, Graphs
from tutti.train.state.directions import directions_of
from tutti.train.state.gradient_sums import Sums
from tutti.train.state.joint_update import is_plain, update_jointly, waiting
from tutti.train.state.state import compute_dtype
from tutti.train.state.state_offload import HostMoves
from tutti.train.sync.synchronise import Synchronised, squared_norm
from tutti.train.sync.tied_owners import make_ties

Batches = Callable[[int], Batch]  # micro-batch → this rank's tokens of it
Durations = Callable[[Instruction], float | None]  # seconds that a pass is declared to take
Around = Callable[[Instruction, Callable[[], Handle]], Handle]  # an instruction; what starts it
Watcher = Callable[[StepResult, float], None]  # a step's result; what divides the gradients


class Engine:
    """A rank of a training job."""

    def __init__(
        self,
        plan: Plan,
        spec: ModelSpec,
        rank: int,
        accelerator: Accelerator,
        links: Links,
        *,
        clip_norm: float | None = None,
        durations: Durations | None = None,
        stub: bool = False,
        capture: CaptureSettings | None = None,
    ) -> None:
        """Make a rank's model and state; its weights are to be loaded or initialized.

        `durations` are what an emulated chip on declared time takes for each instruction of the
        compute lane. With `stub` these compute nothing, so that only their time and the messages
        between them are real. `capture` says whether blocks may run as graphs.
        """
        self.plan, self.spec, self.accelerator, self.links = plan, spec, accelerator, links
        self.clip_norm, self.durations, self.stub = clip_norm, durations, stub
        self.seats = Seats(plan, spec)
        self.seat: Seat = self.seats[rank]
        self.schedule: Schedule = build_schedule(plan)
        self.instructions = self.schedule.classes[class_of(self.schedule, self.seat)].instructions
        self.context = EngineContext(self.seat, links)
        self.dtype = compute_dtype(plan.job.precision)
        self.model, selective = self._make_model()
        self.boundaries = Boundaries(
            self.schedule, self.seats, self.seat, links, self.context.boundary
        )
        self.tensors = self.model.tensors_of_units()
        buckets = make_buckets(plan)
        self.parameters = Synchronised(
            self.seats, self.seat, buckets, self.tensors, plan.job, links, accelerator,
            narrow=self.model.narrow_weights(),
        )  # fmt: skip
        self.passes = self._make_passes(selective, capture or CaptureSettings())
        self.moves = HostMoves(accelerator, self.parameters)
        self.directions = directions_of(self.seats, self.seat, self.parameters.all_states())
        if spec.ties_weights and {0, spec.head_unit} <= set(self.seat.units):
            for exchange in self.parameters.of_units([0]):
                exchange.stays = True
        self.ties = make_ties(self.seats, self.seat, buckets, self.parameters)
        self.recorder = Recorder(self.instructions, accelerator)
        self.scaling = LossScaling(plan.job)
        self.step_number = 0  # updates so far; a skipped step is none
        self._batches: dict[int, Batch] = {}
        self._counts: dict[str, Tensor] = {}  # of this step's tokens, and of what divides sums
        self._sums = LateSums(accelerator)
        self._known: StepResult | None = None  # of this step, once it was read
        self._evaluation: Evaluation | None = None  # made when asked for
        self.signal = 0  # added up over all ranks at the end of the step
        self.sums_moments = False  # in this step, for the gradient's noise scale
        self.watcher: Watcher | None = None  # sees reduced gradients before the optimizer does
        self.around: Around | None = None  # sees every instruction before and after it is started
        self.before_update: Callable[[], None] | None = None  # before the step's sums are joined
        self.end = StepEnd(self.instructions)
        self.handlers = self._make_handlers()

    def _make_model(self) -> tuple[Model, SelectiveOperators]:
        """Return this rank's units, and the operators that they use."""
        selective = SelectiveOperators(self.accelerator.operators)
        model = Model(
            self.spec,
            selective,  # type: ignore[arg-type]  # the same methods
            units=self.seat.units,
            parallel=self.context,
            dtype=self.dtype,
            device=self.accelerator.device,
            tied=not tied_apart(self.plan),
            context_kind=self.seat.replica.context_kind,
            narrow=self.plan.job.narrow,
        )
        return model, selective

    def _make_passes(
        self, selective: SelectiveOperators, capture: CaptureSettings
    ) -> Passes | StubPasses:
        """Return what runs the units forward and backward."""
        if self.stub:
            return StubPasses(self.spec, self.seat, self.dtype, self.accelerator.device)
        units = self.model.by_number()
        graphs = Graphs(
            units, self.seat, self.parameters, self.instructions, self.accelerator, capture,
            token_bytes=self.spec.hidden * self.dtype.itemsize,
        )  # fmt: skip
        sums = Sums(self.parameters.all_states(), several=graphs.several)
        return Passes(units, self.seat.replica, self.accelerator, selective, graphs, sums.of)

    def _make_handlers(self) -> Mapping[Op, Callable[[Instruction], Handle]]:
        return {
            Op.FORWARD: self._forward,
            Op.RECOMPUTE: self._recompute,
            Op.BACKWARD_INPUT: self._backward_input,
            Op.BACKWARD_WEIGHT: self._backward_weight,
            Op.SEND: self._send,
            Op.RECEIVE: self._receive,
            Op.GATHER_PARAMETERS: self.parameters.gather,
            Op.REDUCE_GRADIENTS: self.parameters.reduce,
            Op.FETCH: self._fetch,
            Op.OFFLOAD: self._offload,
            Op.SYNC_TIED: self._sync_tied,
            Op.CLIP_NORM: self._clip_norm,
            Op.STEP: self._step,
        }

    @property
    def graphs(self) -> Graphs | None:
        """The blocks that run as graphs; None where passes compute nothing."""
        return self.passes.graphs if isinstance(self.passes, Passes) else None

    def take_masters(self) -> None:
        """Let the optimizer begin at the parameters as they are now: loaded or initialized."""
        for state in self.parameters.all_states():
            state.take_masters()
        self.moves.begin()

    def follow_masters(self) -> None:
        """Let parameters be what the optimizer has: after a checkpoint was loaded into that."""
        for state in self.parameters.all_states():
            state.follow_master()
        self.moves.begin()

    def weights(self) -> list[tuple[str, tuple[slice, ...], Tensor]]:
        """Return this rank's newest weights by logical name, as far as it keeps them."""
        return [part for state in self.parameters.all_states() for part in state.kept_parts()]

    # --- a step ----------------------------------------------------------------------------

    def step(self, batches: Batches, settings: AdamSettings) -> StepResult:
        """Run the instruction list once."""
        if self.graphs is not None:
            self.graphs.begin_step()
        self.begin(batches)
        self._settings = settings
        self.recorder.begin_step()
        self.end.begin()
        self.issue()
        self.recorder.end_step()
        return self.ended()

    def ended(self) -> StepResult:
        """Take a step whose instructions are all done into the state."""
        result = self._result
        self.end.over()
        self.parameters.end_step()
        self.scaling.end_step(skipped=result.skipped)
        self.step_number += not result.skipped
        return result

    def issue(self) -> None:
        """Start every instruction of a step that has begun; no number is read on the way."""
        handles: list[Handle] = []
        for index, entry in enumerate(self.instructions):
            self.end.reach(index)
            for earlier in entry.after:
                self._wait(handles, earlier)
            self.recorder.start(index)
            run = partial(self.start, entry, self.handlers[entry.op])
            handles.append(run() if self.around is None else self.around(entry, run))
            self.recorder.issued(index)
        self.end.reach(len(self.instructions))
        for index, entry in enumerate(self.instructions):
            if entry.op is not Op.OFFLOAD:  # may be on its way yet: whoever fetches it waits
                self._wait(handles, index)

    @property
    def _result(self) -> StepResult:
        """What the step came to; asking for it waits for the chip to know."""
        if self._known is None:
            self._known = self._sums.read().result(self.passes.loss_scale)
        return self._known

    def _wait(self, handles: list[Handle], index: int) -> None:
        """Wait for an instruction, once."""
        handle = handles[index]
        if isinstance(handle, Done):
            return
        since = time.perf_counter()
        self.recorder.waits(index)
        self.end.waits(index)
        handle.wait()
        self.recorder.waited(index, since)
        handles[index] = DONE

    def start(self, entry: Instruction, handler: Callable[[Instruction], Handle]) -> Handle:
        """Start an instruction; one of the compute lane takes the time of the chip it is for."""
        if entry.lane is not Lane.COMPUTE:
            return handler(entry)
        declared_s = None if self.durations is None else self.durations(entry)
        with self.accelerator.paced(declared_s):
            return handler(entry)

    def begin(self, batches: Batches) -> None:
        """Begin a step, or the forward half of one, with its tokens."""
        self.passes.begin_step(self.scaling.factor)
        self._next_batch, self._counts, self._known = batches, {}, None

    def evaluate(self, batches: Batches) -> EvaluationResult:
        """Return the loss of a step's worth of tokens, without training on them."""
        if self._evaluation is None:
            forward = {**self.handlers, Op.FORWARD: self._forward_only}
            self._evaluation = Evaluation(self.instructions, forward, self.start)
        self.begin(batches)
        with torch.no_grad():
            self._evaluation.run()
        zero = torch.zeros((), device=self.accelerator.device)
        parts = {"square": zero, "signals": zero, **self._loss_sums()}
        self._sums.send(joined(self.links, self.seats.num_ranks, parts))
        return EvaluationResult.of(self._sums.read())

    # --- passes ----------------------------------------------------------------------------

    def _forward(self, entry: Instruction) -> Handle:
        batch = self._batches[entry.micro_batch]
        self.passes.forward(entry.start, entry.stop, entry.micro_batch, batch)
        self.parameters.passed(range(entry.start, entry.stop), upwards=True)
        return DONE

    def _forward_only(self, entry: Instruction) -> Handle:
        self._forward(entry)
        self.passes.forget(range(entry.start, entry.stop), entry.micro_batch)
        return DONE

    def _recompute(self, entry: Instruction) -> Handle:
        self.passes.recompute(entry.start, entry.stop, entry.micro_batch)
        return DONE

    def _backward_input(self, entry: Instruction) -> Handle:
        self.passes.backward_input(entry.start, entry.stop, entry.micro_batch)
        self.parameters.passed(range(entry.start, entry.stop), upwards=False)
        return DONE

    def _backward_weight(self, entry: Instruction) -> Handle:
        lent = self.passes.backward_weight(entry.start, entry.stop, entry.micro_batch)
        self.parameters.collect(entry.start, entry.stop, lent)
        return DONE

    # --- messages --------------------------------------------------------------------------

    def _send(self, entry: Instruction) -> Handle:
        held = self.passes.streams if entry.what is What.ACTIVATIONS else self.passes.gradients
        stream = held.pop((entry.start, entry.micro_batch))
        return self.boundaries.send(stream.detach(), entry.start, entry.what)

    def _receive(self, entry: Instruction) -> Handle:
        like = torch.empty(0, dtype=self.dtype, device=self.accelerator.device)
        handle, tensor = self.boundaries.receive((self.spec.hidden,), like, entry.start, entry.what)
        held = self.passes.streams if entry.what is What.ACTIVATIONS else self.passes.gradients
        held[entry.start, entry.micro_batch] = tensor
        return handle

    def _fetch(self, entry: Instruction) -> Handle:
        if entry.what is What.BATCH:
            batch = self._next_batch(entry.micro_batch)
            self._batches[entry.micro_batch] = batch
            if self.spec.head_unit in self.seat.units and self.seat.tensor.rank == 0:
                for name, own in counts_of(batch).items():
                    self._counts[name] = self._counts.get(name, 0) + own
        elif entry.what is What.ACTIVATIONS:
            self.passes.fetch_activations(range(entry.start, entry.stop), entry.micro_batch)
        else:
            return self.moves.fetch(entry)
        return DONE

    def _offload(self, entry: Instruction) -> Handle:
        if entry.what is not What.ACTIVATIONS:
            return self.moves.offload(entry)
        self.passes.offload_activations(range(entry.start, entry.stop), entry.micro_batch)
        return DONE

    # --- the end of the step ---------------------------------------------------------------

    def _sync_tied(self, entry: Instruction) -> Handle:
        assert self.ties is not None
        if entry.what is What.GRADIENTS:
            self.parameters.close()
            return self.ties.sync_gradients(self.links)
        return self.ties.sync_parameters(self.links)

    def _clip_norm(self, entry: Instruction) -> Handle:
        """Join the norm, the token count and the losses of all ranks; nothing else crosses all."""
        del entry
        self.parameters.close()
        states = self.parameters.all_states()
        square = squared_norm(states, self.seat.place.pipeline, self.accelerator)
        signals = torch.full((), float(self.signal), device=self.accelerator.device)
        parts = {"square": square, "signals": signals, **self._loss_sums()}
        if self.sums_moments:
            parts |= moment_sums(states, self.seat.place.pipeline, self.accelerator)
        if self.before_update is not None:
            self.before_update()
        # from here on others may know the sums before this rank does, and finish alone
        self.end.pending = self.directions is None or self.stub
        self.take_sums(joined(self.links, self.seats.num_ranks, parts))
        return DONE

    def take_sums(self, scalars: Tensor) -> None:
        """Take the sums of all ranks: then nothing but this rank's own work is left."""
        self._sums.send(scalars)
        self._factor = gradient_factor(scalars, self.passes.loss_scale, self.clip_norm)
        if self.directions is not None and not self.stub:
            number = self.step_number + 1
            self.directions.set_directions(self.links, self._settings, self._factor, number)
        self.end.settled(scalars)
        if self.watcher is not None:
            self.watcher(self._result, max(self._result.count, 1) * self.passes.loss_scale)

    def _loss_sums(self) -> dict[str, Tensor]:
        """Return what this rank adds to losses and tokens, and forget the batches."""
        self._batches.clear()
        zero = torch.zeros((), device=self.accelerator.device)
        totals = self.passes.totals if self.seat.tensor.rank == 0 else {}
        margin, right = totals.get("figures", zero.expand(2))
        sums = {name: value for name, value in totals.items() if value.dim() == 0}
        return {**self._counts, **sums, "margin": margin, "right": right}

    def _step(self, entry: Instruction) -> Handle:
        for exchange in self.parameters.of_units(range(entry.start, entry.stop)):
            for state in exchange.states:
                if not state.has_gradients:
                    continue  # updated with an earlier bucket that it travels with
                if self.stub:
                    state.forget_gradients()
                    continue
                update = state.step
                if self.graphs is not None and self.graphs.active and is_plain(state):
                    update = partial(update_jointly, waiting(self.parameters.all_states()))
                update(
                    self.accelerator.operators,
                    number=self.step_number + 1,
                    settings=self._settings,
                    factor=self._factor,
                )
        return DONE
