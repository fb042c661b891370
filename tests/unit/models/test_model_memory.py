"""Activation bytes against Korthikanti et al. 2022, and weight bytes per rank."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from tutti.errors import InputError
from tutti.models import (
    ParameterClass,
    Workload,
    activation_bytes,
    boundary_bytes,
    kept_activations,
    load_model,
    local_parameters,
    plain_gpt,
    weight_bytes,
)

# Table 3 of the paper, 22B to 1T; then the same shapes as Hugging Face configs
SHAPES = [(64, 6144, 48), (96, 12288, 96), (128, 20480, 105), (160, 25600, 128), (16, 1024, 2)]
CATALOG = ["megatron-22b", "gpt-3-175b", "megatron-turing-530b", "gpt-1t"]
GRID = list(product(SHAPES, [1, 2, 8], [1, 4]))


def gpt(shape: tuple[int, int, int]):  # type: ignore[no-untyped-def]
    heads, hidden, layers = shape
    return plain_gpt(layers=layers, hidden=hidden, heads=heads)


def unfused(sequences: int, tp: int = 1, *, sequence_parallel: bool = False) -> Workload:
    return Workload(
        sequences=sequences,
        sequence_length=2048,
        tp=tp,
        sequence_parallel=sequence_parallel,
        fused_attention=False,
        fused_cross_entropy=False,
    )


@pytest.mark.parametrize(("shape", "t", "b"), GRID)
def test_activations_are_korthikantis(shape: tuple[int, int, int], t: int, b: int) -> None:
    spec, (a, h, _), s = gpt(shape), shape, 2048
    plain, sliced = unfused(b), unfused(b, t)
    parallel = unfused(b, t, sequence_parallel=True)
    exact = {"rel": 1e-9, "abs": 0}
    kept = activation_bytes
    scores = 5 * a * s / h
    assert kept(spec, 1, plain) == pytest.approx(s * b * h * (34 + scores), **exact)
    assert kept(spec, 1, sliced) == pytest.approx(s * b * h * (10 + 24 / t + scores / t), **exact)
    assert kept(spec, 1, parallel) == pytest.approx(s * b * h / t * (34 + scores), **exact)
    assert kept(spec, 1, plain, "selective") == pytest.approx(34 * s * b * h, **exact)
    assert kept(spec, 1, sliced, "selective") == pytest.approx(s * b * h * (10 + 24 / t), **exact)
    assert kept(spec, 1, parallel, "selective") == pytest.approx(34 * s * b * h / t, **exact)
    assert kept(spec, 1, sliced, "full") == pytest.approx(2 * s * b * h, **exact)
    assert kept(spec, 1, parallel, "full") == pytest.approx(2 * s * b * h / t, **exact)


@pytest.mark.parametrize(("shape", "t", "b"), GRID)
def test_fused_attention_keeps_a_number_per_row(
    shape: tuple[int, int, int], t: int, b: int
) -> None:
    spec, (a, h, _), s = gpt(shape), shape, 2048
    work = replace(unfused(b, t, sequence_parallel=True), fused_attention=True)
    expected = (34 * s * b * h + 4 * a * s * b) / t
    assert activation_bytes(spec, 1, work) == pytest.approx(expected, rel=1e-9)
    selective = activation_bytes(spec, 1, work, "selective")
    assert selective == pytest.approx(34 * s * b * h / t, rel=1e-9)


@pytest.mark.parametrize(("shape", "t", "b"), GRID)
def test_the_ends_are_korthikantis(shape: tuple[int, int, int], t: int, b: int) -> None:
    """§4.3: an embedding dropout mask; then norm, head input and single-precision logits."""
    spec, (_, h, _), s, v = gpt(shape), shape, 2048, 51200
    work = unfused(b, t, sequence_parallel=True)
    assert activation_bytes(spec, 0, work) == pytest.approx(s * b * h / t, rel=1e-9)
    head = 4 * s * b * h / t * (1 + v / h)
    assert activation_bytes(spec, spec.head_unit, work) == pytest.approx(head, rel=1e-9)
    fused = replace(work, fused_cross_entropy=True)
    gathered = 2 * s * b * h  # the gradient of all ranks' tokens
    norm = 2 * s * b * h / t
    assert activation_bytes(spec, spec.head_unit, fused) == pytest.approx(norm + gathered)


@pytest.mark.parametrize(("name", "shape"), list(zip(CATALOG, SHAPES, strict=False)))
def test_catalog_and_numbers_describe_the_same_model(
    name: str, shape: tuple[int, int, int]
) -> None:
    by_name, by_numbers, work = load_model(name), gpt(shape), unfused(1, 8)
    assert by_name.num_parameters == by_numbers.num_parameters
    for unit in (0, 1, by_name.head_unit):
        assert activation_bytes(by_name, unit, work) == activation_bytes(by_numbers, unit, work)


def test_a_llama_block_by_hand() -> None:
    """Norm inputs, attention input, q, k, v, output, mlp input, gate, up, product; no dropout."""
    spec, s, h, kv, f = load_model("llama-3-8b"), 4096, 4096, 1024, 14336
    elements = s * (2 * h + h + (h + 2 * kv) + h + h + 3 * f)
    log_sum_exp = 4 * s * 32
    assert activation_bytes(spec, 1, Workload(sequence_length=s)) == 2 * elements + log_sum_exp


def test_a_latent_expert_block_by_hand() -> None:
    spec, s, h = load_model("deepseek-v3"), 4096, 7168
    latents = 2 * (1536 + 512)  # each before and after its norm
    attention = h + latents + 128 * (192 + 192 + 128) + 128 * 128
    shared, routed = 3 * 2048, 8 * (h + 3 * 2048 + h)
    elements = s * (2 * h + attention + h + shared + routed)
    single = 4 * s * (128 + 256)  # log-sum-exp and router scores
    work = Workload(sequence_length=s)
    assert activation_bytes(spec, 10, work) == 2 * elements + single


def test_kept_tensors_have_names() -> None:
    spec = load_model("gpt-3-175b")
    names = [tensor.name for tensor in kept_activations(spec, 1, unfused(1))]
    assert len(names) == len(set(names))
    assert "softmax output" in names
    core = {t.name for t in kept_activations(spec, 1, unfused(1)) if t.core_attention}
    assert core == {"softmax output", "attention mask", "dropout output"}
    with pytest.raises(InputError, match="recompute is 'selectiv'; did you mean 'selective'"):
        kept_activations(spec, 1, unfused(1), "selectiv")  # type: ignore[arg-type]


def test_parallel_residuals_share_their_norm() -> None:
    """Falcon-7B has one norm per block: its output is kept once, GPT-NeoX's two are both."""
    falcon, neox, s = load_model("falcon-7b"), load_model("gpt-neox-20b"), 2048
    count = [t.name for t in kept_activations(falcon, 1, Workload(sequence_length=s))]
    assert "mlp input" not in count
    assert "mlp input" in [t.name for t in kept_activations(neox, 1, Workload(sequence_length=s))]


# --- weights -----------------------------------------------------------------------------------


def test_weights_are_sliced_by_tensor_parallelism() -> None:
    spec = load_model("llama-3-8b")
    h, kv, f = 4096, 1024, 14336
    norms = 2 * h
    assert local_parameters(spec, 1) == 2 * h * h + 2 * h * kv + 3 * h * f + norms
    assert local_parameters(spec, 1, tp=8) == (2 * h * h + 2 * h * kv + 3 * h * f) // 8 + norms
    # 16 ranks share 8 key-value heads: each holds one whole
    assert local_parameters(spec, 1, tp=16) == ((2 * h * h + 3 * h * f) // 16 + 2 * h * 128 + norms)
    assert weight_bytes(spec, 1, Workload(sequence_length=8, tp=8)) == 2 * local_parameters(
        spec, 1, tp=8
    )


def test_vocabularies_are_padded() -> None:
    spec = load_model("gpt2-xl")
    assert local_parameters(spec, 0, tp=5) == -(-50257 // 5) * 1600 + 1024 * 1600


def test_experts_are_spread_or_sliced() -> None:
    spec = load_model("mixtral-8x7b")
    experts = 8 * 3 * 4096 * 14336
    of = ParameterClass.EXPERT
    assert local_parameters(spec, 1, group=of) == experts
    assert local_parameters(spec, 1, ep=8, group=of) == experts // 8
    assert local_parameters(spec, 1, tp=4, group=of) == experts // 4
    assert local_parameters(spec, 1, tp=4, ep=8, group=of) == experts // 8
    assert local_parameters(spec, 1, tp=4, ep=8, expert_tp=4, group=of) == experts // 32
    dense = local_parameters(spec, 1, group=ParameterClass.DENSE)
    assert dense + experts == local_parameters(spec, 1)


def test_boundary_bytes() -> None:
    spec = load_model("llama-3-8b")
    work = Workload(sequences=2, sequence_length=4096, cp=2)
    assert boundary_bytes(spec, work) == 2 * 4096 * 4096
    assert boundary_bytes(spec, replace(work, tp=4, sequence_parallel=True)) == 2 * 1024 * 4096
