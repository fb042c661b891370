"""Published runs as Plans: what validation predicts is what `tutti predict` would say of them.

A run becomes a uniform Plan on a cluster of its chips' usual nodes; what its software does that no
Plan says (kernels, what exactly is recomputed) goes into the `Sources`. Its step is then the
product's own estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from tutti.cost.arrays import FloatArray
from tutti.cost.calibration.conventions import public_models
from tutti.cost.calibration.runs import Run
from tutti.cost.calibration.table import RunTable
from tutti.cost.constants import Constants
from tutti.cost.kernels import RECOMPUTED_SHARES, Kernels, RecomputedShares
from tutti.cost.plan.sources import Sources
from tutti.errors import InputError
from tutti.hardware.chip import Dtype
from tutti.hardware.cluster import Cluster
from tutti.hardware.library import shipped
from tutti.hardware.node import NicPerChip, NodeType
from tutti.hardware.pool import Pool
from tutti.models import load_model
from tutti.models.memory import Recompute
from tutti.models.parts import DropoutSpec
from tutti.models.plain_decoder import plain_gpt
from tutti.models.spec import ModelSpec
from tutti.plan.job import Job, Precision, ScheduleKind
from tutti.plan.plan import Plan
from tutti.plan.uniform import Degrees, uniform_plan
from tutti.simulate.estimate import Estimate, estimate

_FORMATS = {0.0: Dtype.BF16, 1.0: Dtype.FP8, 2.0: Dtype.FP4}
_GRADIENTS = {2.0: Dtype.BF16, 4.0: Dtype.FP32}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPlan:
    """A run as the product sees it."""

    plan: Plan
    model: ModelSpec
    cluster: Cluster
    kernels: Kernels

    def estimate(self, constants: Constants) -> Estimate:
        """Return what the product predicts under some constants."""
        sources = Sources(kernels=self.kernels, constants=constants)
        return estimate(self.plan, self.model, self.cluster, sources)


class PlanPredictor:
    """The product's own estimate of runs, each as a Plan."""

    def __init__(self, progress: Callable[[int, int], None] | None = None) -> None:
        self.refused: dict[str, str] = {}  # why a run is no Plan, by its id
        self._progress = progress

    def __call__(self, table: RunTable, constants: Constants) -> FloatArray:
        """Return the predicted seconds per step; not a number where a run is no Plan."""
        seconds = []
        for run in table.runs:
            seconds.append(self._one(run, constants))
            if self._progress is not None:
                self._progress(len(seconds), len(table))
        return np.array(seconds, dtype=np.float64)

    def _one(self, run: Run, constants: Constants) -> float:
        try:
            return published_plan(run).estimate(constants).step_seconds
        except InputError as error:
            self.refused[run.id] = f"no Plan says what it did: {error}"
            return math.nan


def published_plan(run: Run) -> PublishedPlan:
    """Return the Plan of a run; InputError where no Plan says what it did."""
    strategy = run.strategy
    model = _model(run)
    cluster = _cluster(run)
    kind, shares = _recomputation(strategy)
    vpp = int(strategy["vpp"])
    dp, micro_batch = int(strategy["dp"]), int(strategy["sequences"])
    degrees = Degrees(
        **{name: int(strategy[name]) for name in ("tp", "pp", "cp", "ep")},
        dp=dp,
        vpp=vpp,
        micro_batch=micro_batch,
        shard=int(strategy["shard"]),
        sequence_parallel=bool(strategy["sequence_parallel"]) and strategy["tp"] > 1,
        overlap=run.source.overlaps_gradients,
        recompute=kind,
    )
    job = Job(
        sequence_length=int(strategy["sequence_length"]),
        global_batch=dp * micro_batch * int(strategy["micro_batches"]),
        precision=Precision(
            compute=_FORMATS[strategy["fp8"]], gradients=_GRADIENTS[strategy["grad_bytes"]]
        ),
        schedule=ScheduleKind.INTERLEAVED if vpp > 1 else ScheduleKind.ONE_F_ONE_B,
    )
    kernels = Kernels(
        fused_attention=bool(strategy["flash"]),
        fused_cross_entropy=not run.source.eager_loss,
        logit_chunk_bytes=math.inf,
        compiled=bool(strategy["compiled"]),
        asynchronous_tp=bool(strategy["async_tp"]),
        split_backward=False,
        row_scales=bool(strategy["fp8_rowwise"]),
        dispatches_once=bool(strategy["once_per_node"]),
        gathered_bytes=strategy["param_comm_bytes"],
        recomputed={**RECOMPUTED_SHARES, kind: shares},
    )
    plan = uniform_plan(model, cluster, job, degrees)
    return PublishedPlan(plan=plan, model=model, cluster=cluster, kernels=kernels)


def _recomputation(strategy: Mapping[str, float]) -> tuple[Recompute, RecomputedShares]:
    """Return the kind of recomputation that keeps as much, with the shares that run again."""
    names = ("gemm", "attention", "elementwise", "network")
    shares = RecomputedShares(*(strategy[f"recompute_{name}"] for name in names))
    if not any(shares):
        return "none", shares
    # what keeps most results of products keeps about as much as selective recomputation
    return ("full" if shares.products > 0.5 else "selective"), shares


# --- model -----------------------------------------------------------------------------------


def _model(run: Run) -> ModelSpec:
    shape, length = run.shape, int(run.strategy["sequence_length"])
    known = public_models().shape(run.model)
    spec = _catalog_model(known, shape) if known is not None else None
    if spec is None:
        experts = int(shape["experts"])
        spec = plain_gpt(
            layers=int(shape["layers"]),
            hidden=int(shape["hidden"]),
            heads=int(shape["heads"]),
            kv_heads=int(shape["kv_heads"]),
            ffn=int(shape["ffn"]),
            gated_mlp=bool(shape["gated"]),
            vocab=int(shape["head_vocab"]),
            sequence_length=length,
            experts=experts or None,
            topk=int(shape["topk"]) if experts else None,
            tied=bool(shape["tied"]),
            name=run.model,
        )
    rate = 0.1 if shape["dropout"] else 0.0
    dropout = DropoutSpec(attention=rate, residual=rate, embedding=rate)
    return replace(spec, dropout=dropout, max_length=max(spec.max_length, length))


def _catalog_model(name: str, shape: Mapping[str, float]) -> ModelSpec | None:
    """Return a model of the catalog with the run's layers; None if it differs in more than that."""
    spec = load_model(name)
    block = spec.blocks[0]
    ffn = next((b.mlp.hidden for b in spec.blocks if b.mlp is not None), shape["ffn"])
    same = (spec.hidden, block.attention.heads, ffn) == (
        shape["hidden"],
        shape["heads"],
        shape["ffn"],
    )
    if not same:
        return None
    layers, routed = int(shape["layers"]), int(shape["moe_layers"])
    cycle = spec.cycle
    if layers < spec.num_layers and routed > 0:
        dense_index = next((i for i, b in enumerate(spec.blocks) if b.moe is None), None)
        moe_index = next(i for i, b in enumerate(spec.blocks) if b.moe is not None)
        dense = layers - routed
        parts = [(dense_index, dense), (moe_index, routed)]
        cycle = tuple((i, count) for i, count in parts if count and i is not None)
    return replace(spec, num_layers=layers, cycle=cycle, vocab=int(shape["head_vocab"]))


# --- cluster ---------------------------------------------------------------------------------


def _cluster(run: Run) -> Cluster:
    library = shipped()
    node = _node(library.node_for(library.chips[run.chip]), run)
    nodes = math.ceil(run.strategy["num_chips"] / node.num_chips)
    return Cluster(name="published", pools=(Pool(name="runs", node=node, nodes=nodes),))


def _node(node: NodeType, run: Run) -> NodeType:
    """Return a chip's usual node, as far as the source does not say otherwise."""
    source = run.source
    num_chips = min(node.num_chips, source.most_chips_per_node or node.num_chips)
    if num_chips < node.num_chips:
        slots = range(num_chips)
        node = replace(
            node,
            num_chips=num_chips,
            hosts=max(1, node.hosts * num_chips // node.num_chips),
            islands=tuple(
                replace(i, slots=type(i.slots)(tuple(s for s in i.slots if s in slots)))
                for i in node.islands
            ),
            nics=node.nics[: max(1, len(node.nics) * num_chips // node.num_chips)],
        )
    if source.nic is not None:
        nics = source.nics or len(node.nics)
        per_chip = NicPerChip(rate=source.nic / nics, per_chip=nics / node.num_chips)
        node = replace(node, nics=per_chip.spread(node.num_chips))
    return node
