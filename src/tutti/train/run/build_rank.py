"""How a rank comes to be: it meets the others, makes its engine, opens its data and its saves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from tutti.accelerator import Accelerator
from tutti.comm import Communicator
from tutti.comm.connect import connect
from tutti.comm.entry.store import PrefixedStore, Store
from tutti.comm.places import place_of
from tutti.errors import InputError
from tutti.nn.initialize import initialize
from tutti.observe.folder import CHECKPOINTS
from tutti.ranks import rendezvous
from tutti.ranks.rank_places import class_of
from tutti.schedule.instruction import Instruction
from tutti.simulate.estimate import Estimate
from tutti.train.checkpoint import (
    Checkpointer,
    CheckpointSettings,
    Processes,
    Progress,
    load_hf,
)
from tutti.train.checkpoint.restore import Reading
from tutti.train.data.open_data import PackedData, open_data
from tutti.train.data.order import run_dry
from tutti.train.engine.engine import Engine
from tutti.train.graphs.captured_blocks import CaptureSettings
from tutti.train.run.agreement import job_facts
from tutti.train.run.rank_context import RankContext
from tutti.train.run.safety import check_arithmetic
from tutti.train.run.starting import Resume, check_batch, which_checkpoint
from tutti.train.run.weights import model_folder, wants_pretrained
from tutti.train.sync.comm_links import CommLinks


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A rank's ways to the others."""

    comm: Communicator
    control: Communicator  # what hosts tell each other
    saving: Processes

    def meet(self) -> None:
        """Make sure that all ranks are there: what waits for a save does not say who is not."""
        if self.comm.size > 1:
            self.comm.barrier().wait()


def join(
    context: RankContext, accelerator: Accelerator, stack: ExitStack, store: Store | None = None
) -> Joined:
    """Meet the other ranks, at the job's store or a given one; the stack closes connections."""
    context.say("waiting for the other ranks")
    rendezvous.tell_of_strangers(lambda text: context.events.send("stranger", text=text))
    job, timeout_s, world = context.job, context.config.timeout_s, context.plan.num_ranks
    if store is None:
        store = rendezvous.open_store(timeout_s)
    rendezvous.agree(store, context.rank, world, job_facts(job), timeout_s)
    comm = connect(
        PrefixedStore("comm", store),
        context.rank,
        world,
        place=place_of(job.cluster, context.position),
        accelerator=accelerator,
        profile=job.chip_profiles(),
        timeout_s=timeout_s,
        start_timeout_s=timeout_s,
        secret=rendezvous.job_secret(),
        stranger=rendezvous.name_stranger,
    )
    stack.callback(comm.close)
    return Joined(comm=comm, control=comm.control("control"), saving=Processes(comm))


# --- the engine ------------------------------------------------------------------------------


def build_engine(
    context: RankContext, accelerator: Accelerator, links: CommLinks, predicted: Estimate
) -> Engine:
    """Make the rank's engine; a device that multiplies wrongly is refused."""
    engine = Engine(
        context.plan,
        context.spec,
        context.rank,
        accelerator,
        links,
        clip_norm=context.config.optimizer.clip_norm,
        durations=_durations(context, accelerator, predicted),
        stub=context.config.emulate == "stub",
        capture=_capture(context, accelerator, predicted),
    )
    if not getattr(accelerator, "mode", ""):  # emulated chips calculate on the host
        check_arithmetic(engine)
    return engine


def _capture(
    context: RankContext, accelerator: Accelerator, predicted: Estimate
) -> CaptureSettings:
    """Return what is wanted of graphs, and the memory that the plan leaves for them."""
    promised = predicted.memory[class_of(predicted.schedule, context.seat)].total
    room = int(accelerator.memory().total - promised)
    return CaptureSettings(mode=context.config.capture, room_bytes=room, say=context.say)


def _durations(
    context: RankContext, accelerator: Accelerator, predicted: Estimate
) -> Callable[[Instruction], float | None] | None:
    """Return what a chip on declared time takes: what the cost model says."""
    if getattr(accelerator, "mode", "") != "declared":
        return None
    rank_class = class_of(predicted.schedule, context.seat)
    costs = predicted.priced.costs.classes[rank_class]
    entries = predicted.schedule.classes[rank_class].instructions
    table = dict(zip(entries, costs.seconds.tolist(), strict=True))
    return table.__getitem__


# --- data and weights ------------------------------------------------------------------------


def open_job_data(context: RankContext, saving: Processes) -> PackedData:
    """Open the data; the first rank of each node tokenises what nobody has yet."""
    context.say("opening the data")
    data = open_data(
        context.config.data,
        sequence_length=context.plan.job.sequence_length,
        vocabulary=context.spec.vocab,
        model_folder=model_folder(context.config.model),
        objective=context.config.objective,
    )
    for report in data.reports if context.rank == 0 else ():
        context.say(str(report))
    samples = context.config.steps * context.plan.job.global_batch
    for line in run_dry(data.train, samples) if context.rank == 0 else ():
        context.warn(line)
    fingerprints = saving.gather(data.fingerprint)
    if fingerprints is not None and len(set(fingerprints)) > 1:
        other = next(i for i, text in enumerate(fingerprints) if text != fingerprints[0])
        raise InputError(f"rank {other} has other data than rank 0; give all nodes the same files")
    return data


def open_checkpoints(
    context: RankContext,
    saving: Processes,
    stack: ExitStack,
    may_publish: Callable[[], None] = lambda: None,
) -> Checkpointer:
    """Open where the run is saved; the stack closes it. `may_publish` raises where it may not."""
    saves = context.config.checkpoints
    checkpointer = Checkpointer(
        context.config.folder / CHECKPOINTS,
        CheckpointSettings(
            keep_last=saves.keep,
            keep_every=saves.keep_every or None,
            keep_best=saves.keep_best,
            missing=saves.missing,
            asynchronous=saves.asynchronous,
            to=saves.to,
            restore=_restore_way(context),
        ),
        saving,
        model_folder=model_folder(context.config.model),
        say=context.say,
        may_publish=may_publish,
    )
    stack.callback(checkpointer.close)
    checkpointer.catch_up()
    return checkpointer


def _restore_way(context: RankContext) -> Reading:
    """Return who reads checkpoints: as the file says, else as is cheaper where that is known."""
    wanted = context.config.checkpoints.restore
    known = wanted == "auto" and context.job.cluster.storage.shared is not None
    priced = context.job.predicted().storage.restore if known else None
    if priced is None:
        return wanted
    return "broadcast" if priced.broadcast_is_cheaper else "each"


def load_weights(
    context: RankContext,
    engine: Engine,
    checkpointer: Checkpointer,
    data: PackedData,
    resume: Resume,
) -> Progress:
    """Load, read or make the engine's weights; return how far the run is."""
    config = context.config
    if resume is not False:
        if context.spec.tuning is not None and context.spec.tuning.adapter is not None:
            begin_weights(context, engine)  # a checkpoint has only what is trained
        context.say("reading the checkpoint")
        progress = checkpointer.load(engine, which_checkpoint(resume))
        _check_data(progress, data, context.plan.job.global_batch)
        return progress
    begin_weights(context, engine)
    return Progress(seed=config.seed)


def begin_weights(context: RankContext, engine: Engine) -> None:
    """Read or make the weights that the run begins with."""
    config = context.config
    if wants_pretrained(config):
        folder = model_folder(config.model)
        assert folder is not None
        context.say(f"reading the weights of {folder}")
        load_hf(engine, folder, seed=config.seed)
    else:
        context.say("making random weights")
        initialize(engine.model, seed=config.seed)
        engine.take_masters()


def begin_reference(context: RankContext, engine: Engine) -> None:
    """Read or make the weights that answers are held against."""
    given = context.config.objective
    if given is None or not given.reference:
        begin_weights(context, engine)
        return
    folder = model_folder(given.reference)
    if folder is None:
        raise InputError(
            f"objective.reference: {given.reference} is no model folder; name one of the same "
            "shape, or leave it out: then the model that the run begins with is the reference"
        )
    context.say(f"reading the reference's weights of {folder}")
    load_hf(engine, folder, seed=context.config.seed)


def _check_data(progress: Progress, data: PackedData, global_batch: int) -> None:
    """Refuse to go on with other samples than the run would have had."""
    check_batch(progress, global_batch)
    saved = dict(progress.data)
    if saved:
        data.check(data.state(progress.samples).__class__(**saved))  # type: ignore[arg-type]
