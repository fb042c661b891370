"""Opens one rank of a planned engine: its chip, its units, its lanes, its ways to other engines."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tutti.accelerator import Accelerator
from tutti.accelerator.paged import compile_kernels
from tutti.comm import Communicator, connect, place_of
from tutti.comm.entry.store import PrefixedStore
from tutti.cost.serving.engine_prices import engine_prices, require_room_on_hosts
from tutti.hardware.cluster import Cluster
from tutti.models import ModelSpec
from tutti.nn import Model
from tutti.nn.block import compile_joint_blocks
from tutti.plan.check import embedded_cluster, embedded_model
from tutti.plan.engine_part import engine_part, num_engines, pipeline_of
from tutti.plan.plan import Pipeline, Plan, RankMap
from tutti.plan.serving import Role
from tutti.ranks import rendezvous
from tutti.ranks.devices import open_chip
from tutti.ranks.links import Links
from tutti.ranks.single_rank import NoLinks
from tutti.serve.engine import Engine
from tutti.serve.handover.arrivals import Arrivals, Inbox
from tutti.serve.handover.layout import EngineLayout, heads_of
from tutti.serve.handover.sender import Address, KeySender, Outbox, Ways
from tutti.serve.laned_engine import LanedEngine
from tutti.serve.loading import Sizes, dtype_for, end_tokens, prepare
from tutti.serve.pacing import pace_for
from tutti.serve.serving_links import ServingLinks
from tutti.serve.stages import StagePlace, StageWorker, load_stage, stage_worker

START_S = 120.0  # for the other ranks to come
SILENCE_S = 3600.0  # an engine may have nothing to do for long


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenRank:
    """A rank that can take turns."""

    engine: LanedEngine
    spec: ModelSpec
    end: tuple[int, ...]
    num_ranks: int
    takers: frozenset[int]  # ranks that keys and values of prompts come to
    comm: Communicator | None
    accelerator: Accelerator
    stack: ExitStack

    def meet(self) -> None:
        """Wait until all ranks are there."""
        if self.comm is not None:
            self.comm.barrier().wait()

    def close(self) -> None:
        """Leave the other ranks and engines; what was sent has arrived."""
        for lane in self.engine.lanes:
            if isinstance(lane.worker, StageWorker):
                lane.worker.flush()
        self.stack.close()


def open_rank(
    folder: str,
    plan: Plan,
    engine: int,
    rank: int,
    *,
    generation: int,
    dtype: str | None,
    keys: Ways,
    whole: Callable[[str], None],
) -> OpenRank:
    """Open a rank of an engine; `keys` are the ways of keys and values, `whole` hears of them."""
    part, cluster = engine_part(plan, engine), embedded_cluster(plan)
    require_room_on_hosts(plan, embedded_model(plan), cluster)
    (pipeline,) = part.pipelines
    assert pipeline.engine is not None
    chip = RankMap(part).place(rank).chip
    accelerator = open_chip(cluster.pool(chip.pool).chip, chip.slot)
    stack = ExitStack()
    comm = _joined(part, cluster, rank, accelerator, stack)
    links: Links = NoLinks() if comm is None else ServingLinks(comm)
    number = dtype_for(folder, dtype, accelerator)
    weights = pipeline.engine.weights
    model, place = load_stage(
        folder, part, rank, links, accelerator, dtype=number,
        weights=None if weights is None else weights.value,
    )  # fmt: skip
    prepare(model, asked=dtype)
    if accelerator.device.type == "cpu":
        for width in {block.attention.head_dim for block in model.spec.blocks}:
            compile_kernels(number, width)
        compile_joint_blocks(model.blocks)
    end = end_tokens(Path(folder), model.spec)
    workers = _workers(model, place, links, accelerator, part, end)
    prices = engine_prices(model.spec, cluster, pipeline, part.job.sequence_length)
    pace = pace_for(accelerator, prices, place.seat.place.stage)
    for worker in workers:
        worker.pace = pace
        worker.planned = prices.prices()
    layout = EngineLayout.of(pipeline)
    role, arrivals = pipeline.engine.role, None
    takers = frozenset[int]()
    if role is Role.PREFILL:
        _send_keys(plan, engine, rank, layout, workers, accelerator, stack, keys)
    if role is Role.DECODE:
        takers = frozenset(
            r for unit in range(1, model.spec.num_layers + 1) for r in layout.holders(unit)
        )
        arrivals = Arrivals(_own_heads(model.spec, place))
        at = Address(engine, generation, rank)
        inbox = Inbox(arrivals, lambda socket: keys.bind(socket, at), whole)
        stack.callback(inbox.close)
    return OpenRank(
        engine=LanedEngine([Engine(worker) for worker in workers], arrivals),
        spec=model.spec, end=end, num_ranks=part.num_ranks, takers=takers, comm=comm,
        accelerator=accelerator, stack=stack,
    )  # fmt: skip


def _joined(
    part: Plan, cluster: Cluster, rank: int, accelerator: Accelerator, stack: ExitStack
) -> Communicator | None:
    """Meet the other ranks of the engine; None: there are none."""
    if part.num_ranks == 1:
        return None
    comm = connect(
        PrefixedStore("comm", rendezvous.open_store(START_S)),
        rank,
        part.num_ranks,
        place=place_of(cluster, RankMap(part).place(rank).chip),
        accelerator=accelerator,
        timeout_s=SILENCE_S,
        start_timeout_s=START_S,
        secret=rendezvous.job_secret(),
        stranger=rendezvous.name_stranger,
    )
    stack.callback(comm.close)
    return comm


def lane_sizes(pipeline: Pipeline, longest: int) -> Sizes:
    """Return what one lane of an engine has, as the simulator's lanes have it."""
    engine, lanes = pipeline.engine, pipeline.micro_batches
    assert engine is not None
    return Sizes(
        slots=max(1, pipeline.slots // lanes),
        page_size=engine.page_size,
        pages=engine.pages // lanes + 1,
        page_dtype=None if engine.cache is None else engine.cache.value,
        max_length=longest,
        most_tokens=engine.chunk,
        host_pages=engine.host_pages // lanes,
    )


def _workers(
    model: Model,
    place: StagePlace,
    links: Links,
    accelerator: Accelerator,
    part: Plan,
    end: tuple[int, ...],
) -> list[StageWorker]:
    (pipeline,) = part.pipelines
    sizes = lane_sizes(pipeline, part.job.sequence_length)
    return [
        stage_worker(model, place, links, accelerator, sizes, end)
        for _ in range(pipeline.micro_batches)
    ]


def _own_heads(spec: ModelSpec, place: StagePlace) -> dict[int, int]:
    """Return how many heads of keys and values a rank has, by unit; of latents one."""
    heads_of_unit = {}
    for unit in place.seat.units:
        if 1 <= unit <= spec.num_layers:
            attention, members = spec.block(unit).attention, place.seat.tensor
            low, high = heads_of(attention.kv_heads, members.size, members.rank)
            heads_of_unit[unit] = 1 if attention.latent is not None else high - low
    return heads_of_unit


def _send_keys(
    plan: Plan,
    engine: int,
    rank: int,
    layout: EngineLayout,
    workers: list[StageWorker],
    accelerator: Accelerator,
    stack: ExitStack,
    keys: Ways,
) -> None:
    """Let keys and values of prompts leave for the engines that routes lead to."""
    number, _ = pipeline_of(plan, engine)
    fed = {route.decode for route in plan.routes if route.prefill == number}
    others = {}
    for other in range(num_engines(plan)):
        target, _ = pipeline_of(plan, other)
        if target in fed:
            others[other] = EngineLayout.of(plan.pipelines[target])
    outbox = Outbox(keys)
    stack.callback(outbox.close)
    for worker in workers:
        worker.sender = KeySender(
            worker.model.spec, layout, rank, others, worker.cache, accelerator, outbox.post
        )
