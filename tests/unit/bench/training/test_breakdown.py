"""Where a step goes: kernels by kind, the least a part can take, and what a target needs."""

from __future__ import annotations

import pytest
import torch

from tutti.accelerator.devices.cpu import CpuAccelerator
from tutti.bench.training.breakdown import (
    IDLE,
    OTHER,
    Part,
    Rates,
    best_rates,
    kernel_seconds,
    kind_of,
    needed,
    parts,
)
from tutti.models.flops import flops_per_token
from tutti.models.load import load_model
from tutti.plan.job import PRECISIONS, Job


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTN", "products"),
        ("aten::addmm", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("_adamw", "optimizer"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("_gated_backward", "norm, rotary, gate"),
        ("_whole_rows", "cross-entropy"),
        ("void something_new(int)", OTHER),
    ],
)
def test_kernels_are_told_by_their_names(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_seconds_of_a_run_are_shared_out() -> None:
    a = torch.randn(256, 256)
    found = kernel_seconds(lambda: torch.mm(a, a).copy_(a), CpuAccelerator())
    assert found["products"] > 0
    assert found["copies"] > 0
    assert set(found) <= {"products", "copies", OTHER, IDLE}


def test_rates_are_of_this_chip() -> None:
    rates = best_rates(CpuAccelerator(), torch.float32)
    assert 1e8 < rates.flops < 1e14
    assert 1e7 < rates.bytes < 1e13


def test_the_least_is_the_models_own_work_at_the_best_rates() -> None:
    spec, rates = load_model("llama-3-8b"), Rates(flops=787e12, bytes=4e12)
    seconds = {"products": 0.5, "attention": 0.06, "optimizer": 0.029, "all else": 0.04}
    job = Job(sequence_length=4096, global_batch=2, precision=PRECISIONS["pure_bf16"])
    found = parts(seconds, spec, job, rates)
    assert [part.name for part in found] == ["products", "attention", "all else", "optimizer"]
    by_name = {part.name: part for part in found}
    both = by_name["products"].least_s * 6 / 6 + by_name["attention"].least_s * 6 / 3.5
    assert both == pytest.approx(flops_per_token(spec, 4096) * 8192 / rates.flops)
    # bf16: the gradient read; parameters and two moments read and written
    assert by_name["optimizer"].least_s == pytest.approx(8.03e9 * 14 / 4e12, rel=0.01)
    assert by_name["all else"].least_s == 0.0


def test_what_a_target_needs() -> None:
    found = [
        Part(name="products", seconds=0.5, least_s=0.36),
        Part(name="all else", seconds=0.1, least_s=0.0),
    ]
    said = needed(found, mfu=0.6, target=0.72)
    assert "100.0 ms shorter" in said
    assert "products 140.0 ms, all else 100.0 ms" in said
    assert "MFU would be 1.000" in said
    assert needed(found, mfu=0.6, target=0.5).startswith("MFU 0.5 is reached")
