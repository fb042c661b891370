"""FLOPs: hand counts for three types, and the definition of DESIGN.md §5 for all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.tiny_configs import TINY
from tutti.errors import InputError
from tutti.models import (
    ModelSpec,
    Operator,
    OperatorKind,
    Workload,
    catalog_names,
    flops_per_token,
    load_model,
    matmul_parameters,
    plain_gpt,
    read_config,
    recompute_flops,
    unit_operators,
)


def unit_flops(spec: ModelSpec, unit: int, work: Workload) -> float:
    return sum(op.forward.flops for op in unit_operators(spec, unit, work))


def by_name(spec: ModelSpec, unit: int, work: Workload) -> dict[str, Operator]:
    return {op.name: op for op in unit_operators(spec, unit, work)}


# --- hand counts, forward, per token -----------------------------------------------------------


def test_llama_3_8b_by_hand() -> None:
    spec, length = load_model("llama-3-8b"), 8192
    query = 2 * 4096 * 4096
    key_value = 2 * 2 * 4096 * (8 * 128)
    output = 2 * 4096 * 4096
    attention = 2 * 32 * (128 + 128) * 8192
    feed_forward = 3 * 2 * 4096 * 14336
    block = query + key_value + output + attention + feed_forward
    head = 2 * 4096 * 128256
    work = Workload(sequence_length=length)
    assert unit_flops(spec, 0, work) == 0
    assert unit_flops(spec, 1, work) == block * length
    assert unit_flops(spec, 33, work) == head * length
    assert flops_per_token(spec, length) == 3 * (32 * block + head)


def test_deepseek_v3_by_hand() -> None:
    spec, length = load_model("deepseek-v3"), 4096
    query = 2 * 7168 * 1536 + 2 * 1536 * 128 * (128 + 64)
    key_value = 2 * 7168 * (512 + 64) + 2 * 512 * 128 * (128 + 128)
    output = 2 * (128 * 128) * 7168
    attention = 2 * 128 * (192 + 128) * 4096
    latent = query + key_value + output + attention
    dense = latent + 3 * 2 * 7168 * 18432
    router = 2 * 7168 * 256
    experts = (8 + 1) * 3 * 2 * 7168 * 2048  # eight routed, one shared
    sparse = latent + router + experts
    head = 2 * 7168 * 129280
    work = Workload(sequence_length=length)
    assert unit_flops(spec, 3, work) == dense * length
    assert unit_flops(spec, 4, work) == sparse * length
    assert unit_flops(spec, 62, work) == head * length
    assert flops_per_token(spec, length) == 3 * (3 * dense + 58 * sparse + head)
    # one extra prediction head: a projection from 2h, one more sparse block, the head again
    extra = spec.with_prediction_heads(1)
    more = 2 * (2 * 7168) * 7168 + sparse + head
    assert unit_flops(extra, 62, work) == (head + more) * length
    assert flops_per_token(extra, length) == flops_per_token(spec, length) + 3 * more


def test_gpt2_xl_by_hand() -> None:
    spec, length = load_model("gpt2-xl"), 1024
    qkv = 2 * 1600 * (3 * 1600)
    output = 2 * 1600 * 1600
    attention = 2 * 2 * 1600 * 1024  # scores and values, all 25 heads of 64
    feed_forward = 2 * 2 * 1600 * 6400
    block = qkv + output + attention + feed_forward
    head = 2 * 1600 * 50257
    work = Workload(sequence_length=length)
    assert unit_flops(spec, 1, work) == block * length
    assert flops_per_token(spec, length) == 3 * (48 * block + head)
    # the familiar form: 6·N + 12·layers·hidden·sequence
    familiar = 6 * matmul_parameters(spec) + 12 * 48 * 1600 * 1024
    assert flops_per_token(spec, length) == familiar


# --- the definition holds everywhere -----------------------------------------------------------


@pytest.mark.parametrize("name", [*TINY, *catalog_names()])
@pytest.mark.parametrize("length", [8, 3000])
def test_operators_add_up_to_model_flops(name: str, length: int) -> None:
    spec = read_config(TINY[name], name) if name in TINY else load_model(name)
    if spec.embedding.dim == spec.hidden:
        spec = spec.with_prediction_heads(length % 3)
    work = Workload(sequences=2, sequence_length=length)
    operators = [op for unit in range(spec.num_units) for op in unit_operators(spec, unit, work)]
    forward = sum(op.forward.flops for op in operators)
    backward = sum(op.backward.flops for op in operators)
    assert backward == pytest.approx(2 * forward, rel=1e-12)
    assert forward + backward == pytest.approx(
        flops_per_token(spec, length) * work.tokens, rel=1e-12
    )


@pytest.mark.parametrize("name", ["llama-3-70b", "deepseek-v3", "gpt-3-175b", "mixtral-8x7b"])
@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (8, 1), (1, 4), (4, 2)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_share_the_work(name: str, tp: int, cp: int, sequence_parallel: bool) -> None:
    """All ranks together do what one would, but for what tensor parallelism repeats."""
    spec = load_model(name)
    whole = Workload(sequence_length=4096)
    split = replace(whole, tp=tp, cp=cp, sequence_parallel=sequence_parallel)
    one, each = by_name(spec, spec.num_layers, whole), by_name(spec, spec.num_layers, split)
    repeated = ("moe.router", "moe.shared_gate", "attention.query_down", "attention.kv_down")
    for operator_name, operator in each.items():
        ways = cp if operator_name in repeated and not sequence_parallel else tp * cp
        assert operator.forward.flops * ways == pytest.approx(one[operator_name].forward.flops)


def test_expert_parallelism_spreads_experts_and_keeps_rows() -> None:
    spec, unit = load_model("qwen3-30b-a3b"), 1
    work = Workload(sequence_length=4096, ep=8)
    up = by_name(spec, unit, work)["moe.experts.gate_up"]
    assert (up.kind, up.count) == (OperatorKind.GROUPED_GEMM, 16)
    assert (up.m, up.n, up.k) == (4096 * 8, 2 * 768, 2048)
    sliced = by_name(spec, unit, replace(work, tp=4, sequence_parallel=True))
    assert (sliced["moe.experts.gate_up"].m, sliced["moe.experts.gate_up"].n) == (4096 * 2, 1536)
    here = by_name(spec, unit, Workload(sequence_length=4096, tp=4))["moe.experts.gate_up"]
    assert (here.m, here.n, here.count) == (4096 * 8, 2 * 768 // 4, 128)


def test_shapes_by_which_operators_are_priced() -> None:
    spec = load_model("llama-3-8b")
    block = by_name(spec, 1, Workload(sequences=2, sequence_length=4096, tp=4, cp=2))
    qkv, down = block["attention.qkv"], block["mlp.down"]
    assert (qkv.m, qkv.n, qkv.k) == (4096, (32 + 2 * 8) * 128 // 4, 4096)
    assert (down.m, down.n, down.k) == (4096, 4096, 14336 // 4)
    assert down.weight_bytes == 2 * 4096 * 14336 // 4
    shape = block["attention"].attention
    assert shape is not None
    assert (shape.sequences, shape.query_length, shape.key_length) == (2, 2048, 4096)
    assert (shape.heads, shape.kv_heads) == (8, 2)
    assert shape.pairs == 2 * (4096 * 4097 / 2) / 2


def test_unmasked_pairs_of_a_window() -> None:
    spec = load_model("mistral-7b")
    shape = by_name(spec, 1, Workload(sequence_length=8192))["attention"].attention
    assert shape is not None
    assert shape.pairs == sum(min(position + 1, 4096) for position in range(8192))


def test_the_backward_pass_is_in_two_parts() -> None:
    block = by_name(load_model("llama-3-8b"), 1, Workload(sequence_length=512))
    qkv, attention, norm = block["attention.qkv"], block["attention"], block["mlp_norm"]
    assert qkv.backward_input.flops == qkv.backward_weight.flops == qkv.forward.flops
    assert attention.backward_input.flops == 2 * attention.forward.flops
    assert attention.backward_weight.flops == 0
    assert norm.forward.flops == 0
    assert norm.forward.traffic_bytes == 2 * 2 * 512 * 4096


def test_recomputed_flops() -> None:
    spec = plain_gpt(layers=2, hidden=256, heads=4)
    work = Workload(sequence_length=128)
    attention = 2 * 2 * 256 * 128 * 128
    assert recompute_flops(spec, 1, work) == 0
    assert recompute_flops(spec, 1, work, "selective") == attention
    assert recompute_flops(spec, 1, replace(work, fused_attention=False), "selective") == attention
    assert recompute_flops(spec, 1, work, "full") == unit_flops(spec, 1, work)


def test_impossible_splits_are_one_line() -> None:
    spec = load_model("llama-3-8b")
    with pytest.raises(InputError, match="llama-3-8b: tp=3 does not divide the 32 attention heads"):
        unit_operators(spec, 1, Workload(sequence_length=8, tp=3))
    with pytest.raises(InputError, match="there is no unit 34; units are 0 to 33"):
        unit_operators(spec, 34, Workload(sequence_length=8))
    with pytest.raises(InputError, match="cp=3 does not divide the sequence of 8"):
        Workload(sequence_length=8, cp=3)
    with pytest.raises(InputError, match="'sequences' is 0"):
        Workload(sequences=0, sequence_length=8)
    with pytest.raises(InputError, match="'expert_tp' is 3; must divide tp=4"):
        Workload(sequence_length=8, tp=4, expert_tp=3)
    with pytest.raises(InputError, match="does not divide the 6 tokens"):
        Workload(sequence_length=6, tp=4, sequence_parallel=True)
