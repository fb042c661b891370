"""Megatron-LM arguments: read back to the same strategy, or refused with the reason."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings

from tests.support.plans import plans
from tests.unit.search.exports import (
    a800,
    cases,
    uniform,
    with_cuts,
    with_replicas,
)
from tutti.errors import InputError
from tutti.export.megatron import layout_text, megatron_arguments
from tutti.hardware.chip import Dtype
from tutti.models.load import load_model
from tutti.plan.check import embedded_cluster, embedded_model
from tutti.plan.job import PRECISIONS, Precision
from tutti.plan.plan import (
    ContextKind,
    Offload,
    Recompute,
    Synchronisation,
)

FEW = settings(max_examples=max(20, settings.default.max_examples // 4))


def export(plan):
    return megatron_arguments(plan, embedded_model(plan), embedded_cluster(plan))


def parsed(words):
    """Read arguments back as {name: value or True or list}."""
    found = {}
    for word in words:
        if word.startswith("--"):
            name = word.removeprefix("--")
            assert name not in found, f"{word} stands twice"
            found[name] = []
        else:
            found[name].append(word)
    return {k: True if not v else int(v[0]) if v[0].isdecimal() else v[0] for k, v in found.items()}


def chunk_layers(layout):
    """Read a layout string as Megatron-LM documents it: decoder layers per chunk."""
    text = layout.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda m: m[1] * int(m[2]), text)
    assert re.fullmatch(r"E[t|]*m*L", text)
    return [cell.count("t") for cell in text.split("|")]


def layers_per_stage(flags):
    """Return decoder layers per pipeline stage, however the flags say it."""
    pp, layers = flags["pipeline-model-parallel-size"], flags["num-layers"]
    if "pipeline-model-parallel-layout" in flags:
        cells = chunk_layers(flags["pipeline-model-parallel-layout"])
        assert len(cells) % pp == 0
        return [sum(cells[stage::pp]) for stage in range(pp)]
    first, last = (flags.get(f"decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    if first is not None:
        middle, rest = divmod(layers - first - last, pp - 2)
        assert rest == 0
        return [first, *[middle] * (pp - 2), last]
    assert layers % pp == 0
    return [layers // pp] * pp


@pytest.mark.parametrize(("name", "degrees"), cases())
def test_uniform_plans_are_read_back(name, degrees):
    plan = uniform(name, degrees)
    if "shard=3" in degrees and len(plan.pipelines[0].stages) > 1:
        pytest.skip("FSDP has no pipeline")
    flags = parsed(export(plan))
    model, pipeline = embedded_model(plan), plan.pipelines[0]
    tp, pp = flags["tensor-model-parallel-size"], flags["pipeline-model-parallel-size"]
    cp, ep = flags.get("context-parallel-size", 1), flags.get("expert-model-parallel-size", 1)
    world = plan.num_ranks
    dp, rest = divmod(world, tp * cp * pp)
    assert rest == 0
    assert dp == pipeline.stages[0].num_replicas
    assert (world // pp) % (ep * flags.get("expert-tensor-parallel-size", 1)) == 0
    assert flags["global-batch-size"] == 512
    assert flags["micro-batch-size"] * dp * pipeline.micro_batches == 512
    assert sum(layers_per_stage(flags)) == model.num_layers == flags["num-layers"]
    blocks = [
        min(stop, model.num_layers + 1) - max(start, 1)
        for stage in pipeline.stages
        for start, stop in stage.units
    ]
    assert layers_per_stage(flags) == blocks
    assert flags["bf16"] is True
    assert ("sequence-parallel" in flags) == ("sp=1" in degrees)
    assert ("use-distributed-optimizer" in flags) == ("shard=" in degrees)
    assert ("recompute-granularity" in flags) == ("recompute" in degrees)


def test_arguments_of_a_known_run():
    words = " ".join(export(uniform("llama-3.1-70b", "tp=4,pp=2,sp=1,shard=1,recompute=full")))
    for said in (
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --sequence-parallel",
        "--micro-batch-size 1 --global-batch-size 512",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--overlap-grad-reduce --use-distributed-optimizer --overlap-param-gather",
        "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64",
        "--group-query-attention --num-query-groups 8 --seq-length 2048",
        "--normalization RMSNorm --norm-epsilon 1e-05 --swiglu --disable-bias-linear",
        "--position-embedding-type rope --rotary-base 500000 --use-rope-scaling",
        "--untie-embeddings-and-output-weights",
    ):
        assert said in words


def test_uneven_layers():
    plan = uniform("llama-2-13b", "tp=8,pp=4,sp=1")  # 40 layers
    ends = parsed(export(with_cuts(plan, 8, 12, 12, 8)))
    assert ends["decoder-first-pipeline-num-layers"] == 8
    assert "pipeline-model-parallel-layout" not in ends
    uneven = parsed(export(with_cuts(plan, 12, 11, 11, 6)))
    assert layers_per_stage(uneven) == [12, 11, 11, 6]
    ragged = parsed(export(with_cuts(plan, 12, 10, 11, 7)))
    assert ragged["pipeline-model-parallel-layout"] == "Et*12|t*10|t*11|t*7L"
    lonely = with_cuts(plan, 0, 20, 20, 0)
    assert chunk_layers(parsed(export(lonely))["pipeline-model-parallel-layout"]) == [0, 20, 20, 0]
    two = uniform("llama-2-13b", "tp=8,pp=2,sp=1")
    assert layers_per_stage(parsed(export(with_cuts(two, 21, 19)))) == [21, 19]


def test_interleaved_layers():
    even = parsed(export(uniform("llama-2-13b", "tp=8,pp=4,vpp=2,sp=1")))
    assert even["num-layers-per-virtual-pipeline-stage"] == 5
    uneven = parsed(export(uniform("llama-2-13b", "tp=8,pp=4,vpp=3,sp=1")))
    cells = chunk_layers(uneven["pipeline-model-parallel-layout"])
    assert len(cells) == 12
    assert sum(cells) == 40


@pytest.mark.parametrize(
    ("layers", "heads", "text"),
    [
        ([3, *[2] * 29, 0], 1, "Et*3|(t*2|)*29,mL"),
        ([1, 1, 1, 1], 0, "Et|(t|)*2,tL"),
        ([0, 2, 0, 0, 1], 0, "E|t*2|(|)*2,tL"),
        ([5, 4], 2, "Et*5|t*4m*2L"),
    ],
)
def test_layout_texts(layers, heads, text):
    assert layout_text(layers, heads) == text
    assert chunk_layers(text) == layers


def test_prediction_heads_stand_before_the_loss():
    model = load_model("deepseek-v3").with_prediction_heads(1)
    plan = uniform("deepseek-v3", "tp=1,pp=4,ep=8,shard=1")
    plan = replace(
        plan, model=replace(plan.model, spec=model, hash=model.fingerprint), tied_owner=0
    )
    flags = parsed(export(plan))
    assert flags["mtp-num-layers"] == 1
    assert flags["pipeline-model-parallel-layout"].endswith("mL")
    assert sum(chunk_layers(flags["pipeline-model-parallel-layout"])) == 61
    assert flags["moe-layer-freq"] == "([0]*3+[1]*58)"
    assert (flags["mscale"], flags["mscale-all-dim"]) == ("1.0", "1.0")


def test_recomputation_of_the_first_layers():
    plan = uniform("llama-2-13b", "tp=8,pp=4,sp=1")
    for index, (start, _) in enumerate(((1, 0), (11, 0), (21, 0), (31, 0))):
        plan = with_replicas(plan, index, recompute=Recompute(full=((start, start + 3),)))
    flags = parsed(export(plan))
    assert flags["recompute-method"] == "block"
    assert flags["recompute-num-layers"] == 3
    flags = parsed(export(uniform("llama-2-13b", "tp=8,pp=4,sp=1,recompute=selective")))
    assert flags["recompute-modules"] == "core_attn"


def test_sharding_and_offload():
    three = parsed(export(uniform("llama-2-13b", "tp=2,sp=1,shard=3")))
    assert three["data-parallel-sharding-strategy"] == "optim_grads_params"
    assert three["ckpt-format"] == "fsdp_dtensor"
    two = parsed(export(uniform("llama-2-13b", "tp=2,sp=1,shard=2")))
    assert two["data-parallel-sharding-strategy"] == "optim_grads"
    plain = uniform("llama-2-13b", "tp=2,pp=2,sp=1")
    assert "use-distributed-optimizer" not in parsed(export(plain))
    quiet = replace(plain, synchronisation=(Synchronisation(units=(0, 42), overlap=False),))
    assert "overlap-grad-reduce" not in parsed(export(quiet))
    alone = uniform("smollm2-1.7b", "dp=1", cluster=a800(1))
    assert "use-distributed-optimizer" not in parsed(export(alone))
    whole = uniform("llama-2-13b", "tp=8,sp=1,shard=1")
    offloaded = with_replicas(whole, offload=Offload(optimizer=((0, 42),)))
    flags = parsed(export(offloaded))
    assert flags["optimizer-cpu-offload"] is True
    assert flags["use-precision-aware-optimizer"] is True
    kept = with_replicas(whole, offload=Offload(activations=((1, 9),)))
    assert parsed(export(kept))["cpu-offloading-num-layers"] == 8


def test_degrees_and_numbers():
    plan = uniform("llama-2-13b", "tp=2,cp=2,sp=1,shard=1")
    plan = with_replicas(plan, context_kind=ContextKind.ALL_GATHER, tp_overlap_chunks=4)
    flags = parsed(export(plan))
    assert flags["cp-comm-type"] == "allgather"
    assert flags["tp-comm-overlap"] is True
    sixteen = parsed(export(uniform("llama-2-13b", "tp=2", precision=PRECISIONS["fp16"])))
    assert sixteen["fp16"] is True
    full = parsed(export(uniform("llama-2-13b", "tp=2", precision=PRECISIONS["fp32"])))
    assert not {"bf16", "fp16"} & set(full)
    narrow = Precision(moments=Dtype.BF16, gradients=Dtype.BF16)
    flags = parsed(export(uniform("llama-2-13b", "tp=2,shard=1", precision=narrow)))
    assert flags["exp-avg-dtype"] == "bf16"
    assert flags["grad-reduce-in-bf16"] is True
    sgd = parsed(export(uniform("llama-2-13b", "tp=2", optimizer="sgd")))
    assert sgd["optimizer"] == "sgd"


def test_whole_experts_or_sliced_ones():
    spread = parsed(export(uniform("mixtral-8x7b", "tp=4,pp=2,ep=8,sp=1")))
    assert spread["expert-model-parallel-size"] == 8
    assert spread["expert-tensor-parallel-size"] == 1
    assert spread["moe-token-dispatcher-type"] == "alltoall"
    sliced = parsed(export(uniform("mixtral-8x7b", "tp=4,pp=2,sp=1")))
    assert (sliced["expert-model-parallel-size"], sliced["expert-tensor-parallel-size"]) == (1, 4)


# --- refusals --------------------------------------------------------------------------------


def test_plans_for_another_number_of_nodes():
    assert "--tensor-model-parallel-size" in export(uniform("qwen2.5-7b", "tp=4", cluster=a800(1)))


@FEW
@given(plans())
def test_any_plan_is_exported_or_refused(plan):
    try:
        flags = parsed(export(plan))
    except InputError as error:
        refused = str(error)
    else:
        tp, pp = flags["tensor-model-parallel-size"], flags["pipeline-model-parallel-size"]
        assert plan.num_ranks % (tp * pp * flags.get("context-parallel-size", 1)) == 0
        assert sum(layers_per_stage(flags)) == embedded_model(plan).num_layers
        return
    assert refused.startswith("Megatron-LM: ")
