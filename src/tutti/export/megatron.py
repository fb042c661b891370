"""A plan as arguments of Megatron-LM's `pretrain_gpt.py`, or the reason why there are none.

Megatron-LM has one degree of each kind of parallelism for the whole job. Ranks run tensor
fastest, then context, data, pipeline: the order of a plan's ranks, so that rank i belongs on the
plan's i-th chip. Data, tokenizer, learning rate and checkpoints are the user's to add.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from tutti.export.megatron_model import Flags, model_flags, precision_flags, refusal, to_arguments
from tutti.export.megatron_strategy import (
    StageShape,
    num_blocks,
    read_sharding,
    read_stages,
    require_native_precision,
    require_schedule,
)
from tutti.hardware.chip import Dtype
from tutti.hardware.cluster import Cluster
from tutti.models.spec import ModelSpec
from tutti.plan.plan import ContextKind, Plan, chunks
from tutti.plan.schedules import schedule_record

TARGET = "Megatron-LM"
_FSDP = {2: "optim_grads", 3: "optim_grads_params"}


def megatron_arguments(plan: Plan, model: ModelSpec, cluster: Cluster) -> list[str]:
    """Return the arguments that run the plan; an InputError says what they cannot express."""
    stages = read_stages(plan, model, cluster, TARGET)
    _require_uniform(stages)
    require_schedule(plan, TARGET)
    require_native_precision(plan, stages, TARGET)
    flags: Flags = {
        **_parallel_flags(plan, stages),
        **_layout_flags(plan, stages, model),
        "micro-batch-size": stages[0].sequences,
        "global-batch-size": plan.job.global_batch,
        **_recompute_flags(stages),
        **_synchronisation_flags(plan, stages, model),
        **precision_flags(plan.job, TARGET),
    }
    # Last, so that the same flag from two sources stands once.
    flags |= _offload_flags(stages, flags)
    _require_sharded_moments(flags)
    return to_arguments(flags | model_flags(model, plan.job, TARGET))


# --- one strategy for all stages -------------------------------------------------------------


def _require_uniform(stages: Sequence[StageShape]) -> None:
    first = stages[0]
    names = {
        "tp": "tensor parallelism",
        "cp": "context parallelism",
        "dp": "data parallelism",
        "context_kind": "kind of context parallelism",
        "sequence_parallel": "sequence parallelism",
        "tp_overlap": "overlap of tensor parallelism",
        "sequences": "micro-batch",
    }
    for stage in stages[1:]:
        for name, words in names.items():
            mine, theirs = getattr(first, name), getattr(stage, name)
            if mine != theirs:
                why = f"its {words} is {theirs}, that of stage 0 {mine}; all stages must have one"
                raise refusal(TARGET, stage.where, why)
    with_experts = [stage for stage in stages if stage.ep is not None]
    for stage in with_experts[1:]:
        mine, theirs = ((s.ep, s.expert_tp) for s in (with_experts[0], stage))
        if mine != theirs:
            why = f"its experts are spread over {theirs[0]} chips (sliced {theirs[1]} ways), in "
            why += f"{with_experts[0].where} over {mine[0]} ({mine[1]}); all stages must have one"
            raise refusal(TARGET, stage.where, why)
    vendors = {chip.vendor for stage in stages for chip in stage.chips}
    if len(vendors) > 1:
        why = f"chips of {' and '.join(sorted(vendors))}; its collectives join one vendor's only"
        raise refusal(TARGET, "chips", why)


def _parallel_flags(plan: Plan, stages: Sequence[StageShape]) -> Flags:
    first = stages[0]
    flags: Flags = {
        "tensor-model-parallel-size": first.tp,
        "pipeline-model-parallel-size": len(stages),
    }
    if first.cp > 1:
        kind = "p2p" if first.context_kind is ContextKind.RING else "allgather"
        flags |= {"context-parallel-size": first.cp, "cp-comm-type": kind}
    if first.sequence_parallel:
        flags["sequence-parallel"] = True
    if first.tp_overlap:
        if not first.sequence_parallel:
            why = "overlaps tensor parallelism without sequence parallelism; it needs both"
            raise refusal(TARGET, first.where, why)
        flags["tp-comm-overlap"] = True
    return flags | _expert_flags(plan, stages)


def _expert_flags(plan: Plan, stages: Sequence[StageShape]) -> Flags:
    with_experts = [(stage.ep, stage.expert_tp) for stage in stages if stage.ep is not None]
    if not with_experts:
        return {}
    first, (ep, sliced) = stages[0], with_experts[0]
    if first.tp > 1 and not first.sequence_parallel:
        why = f"experts with tp {first.tp} need sequence parallelism"
        raise refusal(TARGET, first.where, why)
    flags: Flags = {"expert-model-parallel-size": ep, "expert-tensor-parallel-size": sliced}
    if ep == 1:
        return flags
    if plan.job.precision.parameters is Dtype.FP16:
        raise refusal(TARGET, "job, precision", "expert parallelism does not work with fp16")
    for stage in stages:
        if stage.num_chips % ep:
            why = f"{stage.num_chips} chips do not divide into expert groups of {ep}"
            raise refusal(TARGET, stage.where, why)
    return flags | {"moe-token-dispatcher-type": "alltoall"}


# --- layers onto stages ----------------------------------------------------------------------


def _layout_flags(plan: Plan, stages: Sequence[StageShape], model: ModelSpec) -> Flags:
    pipeline, num_stages = plan.pipelines[0], len(stages)
    if num_stages == 1:
        if len(stages[0].layers) > 1:
            raise refusal(TARGET, "stage 0", "has several unit ranges; interleaving needs 2 stages")
        return {}
    per_chunk = [num_blocks((start, stop), model) for start, stop, _ in chunks(pipeline)]
    rounds = len(per_chunk) // num_stages
    in_groups = schedule_record(plan.job.schedule).several_ranges
    if in_groups and pipeline.micro_batches % num_stages:
        why = f"{pipeline.micro_batches} micro-batches are no multiple of {num_stages} stages"
        raise refusal(TARGET, "pipeline", f"{why}, as its interleaved schedule needs")
    even = len(set(per_chunk)) == 1 and not model.prediction_heads
    if even:
        return {"num-layers-per-virtual-pipeline-stage": per_chunk[0]} if rounds > 1 else {}
    inner = set(per_chunk[1:-1])
    if rounds == 1 and len(inner) == 1 and all(per_chunk) and not model.prediction_heads:
        return {
            "decoder-first-pipeline-num-layers": per_chunk[0],
            "decoder-last-pipeline-num-layers": per_chunk[-1],
        }
    return {"pipeline-model-parallel-layout": layout_text(per_chunk, model.prediction_heads)}


def layout_text(layers: Sequence[int], prediction_heads: int = 0) -> str:
    """Write layers per chunk as a pipeline layout: "Et*3|(tt|)*29,t|L" and the like."""
    cells = [_cell("t", count) for count in layers]
    cells[0] = "E" + cells[0]
    cells[-1] += _cell("m", prediction_heads) + "L"
    runs = [(cell, len(list(group))) for cell, group in groupby(cells)]
    # Every cell brings its separator; the last, which ends in L and stands alone, needs none.
    written = [f"({cell}|)*{count}" if count > 1 else f"{cell}|" for cell, count in runs]
    return ",".join(written)[:-1].replace("|,", "|")


def _cell(letter: str, count: int) -> str:
    return letter if count == 1 else f"{letter}*{count}" if count else ""


# --- memory ----------------------------------------------------------------------------------


def _recompute_flags(stages: Sequence[StageShape]) -> Flags:
    parts = [(stage, layers, count) for stage in stages
             for layers, count in zip(stage.layers, stage.recomputed, strict=True)]  # fmt: skip
    selective = {stage.selective for stage in stages if any(stage.layers)}
    most = max(count for _, _, count in parts)
    if selective == {True}:
        return {"recompute-granularity": "selective", "recompute-modules": ["core_attn"]}
    if True in selective:
        where = next(stage.where for stage in stages if not stage.selective)
        why = "is not selective as in other stages; one kind must serve all"
        raise refusal(TARGET, f"{where}, recompute", why)
    if not most:
        return {}
    if all(count == layers for _, layers, count in parts):
        return {
            "recompute-granularity": "full",
            "recompute-method": "uniform",
            "recompute-num-layers": 1,
        }
    for stage, layers, count in parts:
        if count != min(most, layers):
            why = f"{count} layers fully, elsewhere {most}; their number must be one per chunk"
            raise refusal(TARGET, f"{stage.where}, recompute", why)
    return {
        "recompute-granularity": "full",
        "recompute-method": "block",
        "recompute-num-layers": most,
    }


def _offload_flags(stages: Sequence[StageShape], known: Flags) -> Flags:
    flags = Flags()
    for stage in stages:
        for name in ("parameters", "gradients"):
            if getattr(stage.offload, name):
                why = f"keeps {name} on the host, which no argument says"
                raise refusal(TARGET, f"{stage.where}, offload", why)
    if any(stage.offload.optimizer for stage in stages):
        _require_whole_optimizer(stages)
        if "use-distributed-optimizer" not in known:
            why = "of the optimizer needs the sharded one: shard level 1 and 2 replicas or more"
            raise refusal(TARGET, "offload", why)
        flags |= {"optimizer-cpu-offload": True, "use-precision-aware-optimizer": True}
    offloaded = [stage for stage in stages if stage.offload.activations]
    if offloaded:
        if len(stages) > 1 or "recompute-granularity" in known:
            why = "of activations works only without pipeline stages and without recomputation"
            raise refusal(TARGET, f"{offloaded[0].where}, offload", why)
        flags["cpu-offloading-num-layers"] = _first_layers(stages[0])
    return flags


def _require_whole_optimizer(stages: Sequence[StageShape]) -> None:
    for stage in stages:
        held = sum(stop - start for start, stop in stage.offload.optimizer)
        if held < sum(stage.layers):
            why = f"of {held} units' optimizer state; all or none can be on the host"
            raise refusal(TARGET, f"{stage.where}, offload", why)


def _first_layers(stage: StageShape) -> int:
    """Return how many layers offload their activations; they must be the first."""
    units = sorted(u for a, b in stage.offload.activations for u in range(a, b))
    blocks = [unit for unit in units if 1 <= unit <= stage.layers[0]]
    count = len(blocks)
    if units != blocks or blocks != list(range(1, count + 1)) or count >= stage.layers[0]:
        why = "activations of the first layers only, and not of all of them, can go to the host"
        raise refusal(TARGET, f"{stage.where}, offload", why)
    return count


# --- data parallelism ------------------------------------------------------------------------


def _synchronisation_flags(plan: Plan, stages: Sequence[StageShape], model: ModelSpec) -> Flags:
    rule, first = read_sharding(plan, model, TARGET), stages[0]
    if first.dp * first.cp == 1 or (rule.level == 0 and not rule.overlap):
        return {}
    flags: Flags = {"overlap-grad-reduce": rule.overlap}
    if rule.level == 0:
        return flags
    flags |= {"use-distributed-optimizer": True, "overlap-param-gather": rule.overlap}
    if rule.level >= 2:
        if len(stages) > 1:
            why = f"shard level {rule.level} with {len(stages)} pipeline stages; its FSDP has one"
            raise refusal(TARGET, "synchronisation", f"{why} (with tp, cp and ep)")
        flags |= {
            "use-megatron-fsdp": True,
            "data-parallel-sharding-strategy": _FSDP[rule.level],
            "no-gradient-accumulation-fusion": True,
            "ckpt-format": "fsdp_dtensor",
        }
    return {name: value for name, value in flags.items() if value is not False}


def _require_sharded_moments(flags: Flags) -> None:
    if "exp-avg-dtype" in flags and "use-distributed-optimizer" not in flags:
        why = "narrow moments need the sharded optimizer: shard level 1 and 2 replicas or more"
        raise refusal(TARGET, "job, precision", why)
