"""A plan as a FlagScale training configuration with a `hetero` section, or why there is none.

FlagScale joins *process meshes*: runs of neighbouring stages that share chip kind and degrees,
written as five numbers each (tp, cp, ep, dp, pp). Stages may differ in tensor and data
parallelism, layers and recomputation; inside a stage everything is equal, context parallelism is
one, there is no interleaving and no sharding beyond the optimizer. Facts are those of its
`flagscale/train/arguments.py` and `flagscale/train/hetero/parallel_context.py` (2025). Where a
node's chips are of another kind than the first mesh's, its `type=` in the hostfile says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import yaml

from tutti.export.megatron_model import Flags, model_flags, precision_flags, refusal
from tutti.export.megatron_strategy import (
    Sharding,
    StageShape,
    read_sharding,
    read_stages,
    require_native_precision,
    require_schedule,
)
from tutti.hardware.cluster import Cluster
from tutti.models.spec import ModelSpec
from tutti.plan.plan import Plan

TARGET = "FlagScale"
_PRECISION = ("bf16", "fp16", "accumulate-allreduce-grads-in-fp32", "grad-reduce-in-bf16",
              "fp8-format", "use-precision-aware-optimizer", "exp-avg-dtype",
              "exp-avg-sq-dtype")  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Mesh:
    """Neighbouring stages of one kind of chip with the same degrees."""

    device: str
    tp: int
    cp: int
    dp: int
    ep: int
    expert_tp: int
    pp: int


def flagscale_yaml(plan: Plan, model: ModelSpec, cluster: Cluster) -> str:
    """Return the configuration file; an InputError says what it cannot express."""
    document = flagscale_document(plan, model, cluster)
    head = (
        f"# {model.name} on {cluster.name}: {plan.num_ranks} chips, as tutti planned it. Needs "
        "data_path and a tokenizer,\n# learning rate and checkpoint settings; name each node's "
        "chip in the hostfile (IP slots=8 type=A800).\n"
    )
    return head + yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def flagscale_document(plan: Plan, model: ModelSpec, cluster: Cluster) -> dict[str, Any]:
    """Return the configuration as plain values: sections system, model and data."""
    stages = read_stages(plan, model, cluster, TARGET)
    require_schedule(plan, TARGET)
    require_native_precision(plan, stages, TARGET)
    sharding = _sharding(plan, model)
    meshes = _meshes(stages)
    _require_possible(stages, meshes, model)
    numbers = precision_flags(plan.job, TARGET)
    if "use-precision-aware-optimizer" in numbers and sharding.level == 0:
        raise refusal(TARGET, "job, precision", "narrow moments need shard level 1")
    shape = model_flags(model, plan.job, TARGET)
    vocabulary = shape.pop("vocab-size")
    return {
        "system": {
            **_keys(_system_flags(stages, meshes, sharding)),
            "precision": _keys({k: v for k, v in numbers.items() if k in _PRECISION}),
            **_recompute(plan, stages),
            "hetero": _hetero(stages, meshes, sharding, model),
        },
        "model": {
            **_keys(shape),
            "micro_batch_size": stages[0].sequences,
            "global_batch_size": plan.job.global_batch,
            **_keys({k: v for k, v in numbers.items() if k not in _PRECISION}),
        },
        "data": {"tokenizer": {"vocab_size": vocabulary}},
    }


class _Dumper(yaml.SafeDumper):
    """Writes lists on one line, as such files are read."""


_Dumper.add_representer(
    list,
    lambda dumper, value: dumper.represent_sequence(
        "tag:yaml.org,2002:seq", value, flow_style=True
    ),
)


def _keys(flags: Flags) -> dict[str, Any]:
    """Spell flags as keys of a configuration file."""
    return {name.replace("-", "_"): value for name, value in flags.items() if value is not False}


# --- meshes ----------------------------------------------------------------------------------


def _meshes(stages: Sequence[StageShape]) -> list[_Mesh]:
    shapes = [
        (_device(stage), stage.tp, stage.cp, stage.dp, *_experts(stage, stages)) for stage in stages
    ]
    meshes = [_Mesh(*shape, len(list(group))) for shape, group in groupby(shapes)]
    kinds = [device for device, _ in groupby(mesh.device for mesh in meshes)]
    for device in kinds:
        if kinds.count(device) > 1:
            why = (
                f"{device} comes back after other chips ({', '.join(kinds)}); ranks are sorted by "
                "chip kind, so that the stages of one kind must be neighbours"
            )
            raise refusal(TARGET, "stages", why)
    return meshes


def _device(stage: StageShape) -> str:
    if len(stage.chips) > 1:
        names = " and ".join(chip.name for chip in stage.chips)
        raise refusal(TARGET, stage.where, f"mixes {names}; a process mesh has one kind of chip")
    return stage.chips[0].name


def _experts(stage: StageShape, stages: Sequence[StageShape]) -> tuple[int, int]:
    """Return a stage's expert and expert-tensor degree; one without takes those of the others."""
    with_experts = [(s.ep, s.expert_tp) for s in stages if s.ep is not None]
    if stage.ep is not None or not with_experts:
        return stage.ep or 1, stage.expert_tp
    ep, sliced = with_experts[0]
    if stage.num_chips % (ep * sliced):
        why = f"has no experts, but its {stage.num_chips} chips must divide by the others' ep · tp"
        raise refusal(TARGET, stage.where, f"{why} of {ep * sliced}")
    return ep, sliced


def _require_possible(
    stages: Sequence[StageShape], meshes: Sequence[_Mesh], model: ModelSpec
) -> None:
    first = stages[0]
    for stage in stages:
        if stage.cp != first.cp or stage.context_kind is not first.context_kind:
            why = f"its context parallelism is {stage.cp} ({stage.context_kind}), that of stage 0"
            raise refusal(TARGET, stage.where, f"{why} {first.cp} ({first.context_kind})")
        if not all(stage.layers):
            raise refusal(TARGET, stage.where, "has no decoder layer; each stage needs one")
        offload = stage.offload
        if any((offload.optimizer, offload.parameters, offload.gradients, offload.activations)):
            raise refusal(TARGET, f"{stage.where}, offload", "is not possible across unlike chips")
        if stage.ep and stage.tp > 1 and not stage.sequence_parallel:
            why = f"experts with tp {stage.tp} need sequence parallelism"
            raise refusal(TARGET, stage.where, why)
    for name, words in (("sequence_parallel", "sequence parallelism"), ("tp_overlap", "overlap")):
        sliced = [stage for stage in stages if stage.tp > 1]
        for stage in sliced:
            if getattr(stage, name) != getattr(sliced[0], name):
                why = f"differs from {sliced[0].where} in {words}; all stages with tp must agree"
                raise refusal(TARGET, stage.where, why)
    if any((mesh.ep == 1) != (meshes[0].ep == 1) for mesh in meshes):
        why = f"expert parallelism is {', '.join(str(m.ep) for m in meshes)}; all 1, or none"
        raise refusal(TARGET, "experts", why)
    last = stages[-1]
    if model.ties_weights and first.tp != last.tp:
        why = f"tp {last.tp}, stage 0 has {first.tp}; stages with tied weights need the same"
        raise refusal(TARGET, last.where, why)


# --- sections --------------------------------------------------------------------------------


def _sharding(plan: Plan, model: ModelSpec) -> Sharding:
    rule = read_sharding(plan, model, TARGET)
    if rule.level > 1:
        why = f"shard level is {rule.level}; across process meshes only the optimizer shards (1)"
        raise refusal(TARGET, "synchronisation", why)
    return rule


def _system_flags(stages: Sequence[StageShape], meshes: Sequence[_Mesh], rule: Sharding) -> Flags:
    first = meshes[0]
    vendors = {chip.vendor for stage in stages for chip in stage.chips}
    flags: Flags = {"distributed-backend": "flagcx"} if len(vendors) > 1 else {}
    flags |= {
        "tensor-model-parallel-size": first.tp,
        "pipeline-model-parallel-size": len(stages),
        "context-parallel-size": first.cp,
    }
    if first.cp > 1:
        ring = stages[0].context_kind.value == "ring"
        flags["cp-comm-type"] = "p2p" if ring else "allgather"
    if any(stage.ep is not None for stage in stages):
        flags |= {"expert-model-parallel-size": first.ep}
        flags |= {"expert-tensor-parallel-size": first.expert_tp}
    overlaps = any(stage.tp_overlap for stage in stages)
    parallel = any(stage.sequence_parallel for stage in stages)
    if overlaps and not parallel:
        why = "overlaps tensor parallelism without sequence parallelism; it needs both"
        raise refusal(TARGET, "stage 0", why)
    return flags | {
        "sequence-parallel": parallel,
        "tp-comm-overlap": overlaps,
        "use-distributed-optimizer": rule.level == 1,
        "overlap-grad-reduce": rule.overlap,
        "overlap-param-gather": rule.overlap and rule.level == 1,
    }


def _hetero(
    stages: Sequence[StageShape], meshes: Sequence[_Mesh], rule: Sharding, model: ModelSpec
) -> dict[str, Any]:
    section: dict[str, Any] = {
        "enable_hetero": True,
        "hetero_pipeline_layer_split": [sum(stage.layers) for stage in stages],
        "hetero_process_meshes": [
            number for m in meshes for number in (m.tp, m.cp, m.ep, m.dp, m.pp)
        ],
        "hetero_device_types": [mesh.device for mesh in meshes],
        "hetero_current_device_type": meshes[0].device,
        "standalone_embedding_stage": False,
    }
    if any(stage.ep is not None for stage in stages):
        section["expert_tensor_parallel_size_per_process_mesh"] = [
            mesh.expert_tp for mesh in meshes
        ]
    first, last = meshes[0].dp, meshes[-1].dp
    if model.ties_weights and first != last and rule.level == 1:
        if max(first, last) % min(first, last):
            why = f"dp {last}, stage 0 has {first}; with tied weights one must divide the other"
            raise refusal(TARGET, stages[-1].where, why)
        section["use_partial_reduce_for_shared_embedding"] = True
    return section


def _recompute(plan: Plan, stages: Sequence[StageShape]) -> dict[str, Any]:
    """Say how each stage recomputes; lists are (stages, micro-batches, value) per run of stages."""
    selective = {stage.selective for stage in stages}
    full = [sum(stage.recomputed) for stage in stages]
    if selective == {True}:
        settings: dict[str, Any] = {"recompute_granularity": "selective"}
        return {"recompute": {**settings, "recompute_modules": ["core_attn"]}}
    if True in selective:
        where = next(stage.where for stage in stages if not stage.selective)
        why = "is not selective as in other stages; selective must serve all"
        raise refusal(TARGET, f"{where}, recompute", why)
    if not any(full):
        return {}
    if all(count == sum(stage.layers) for count, stage in zip(full, stages, strict=True)):
        method = {"recompute_method": "uniform", "recompute_num_layers": 1}
        return {"recompute": {"recompute_granularity": "full", **method}}
    runs = [(count, len(list(group))) for count, group in groupby(full)]
    batches = plan.pipelines[0].micro_batches

    def per_stage(values: Sequence[int]) -> list[list[int]]:
        return [[n, batches, value] for value, (_, n) in zip(values, runs, strict=True)]

    return {
        "recompute": {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": max(full),
            "recompute_granularity_per_stage_micro_batch": per_stage(
                [int(count > 0) for count, _ in runs]
            ),
            "recompute_method_per_stage_micro_batch": per_stage([1] * len(runs)),  # 1: block
            "recompute_num_layers_per_stage_micro_batch": per_stage([count for count, _ in runs]),
        }
    }
