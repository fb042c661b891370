"""Every operator runs in every direction, as the profile will name it."""

from __future__ import annotations

import pytest
import torch

from tutti.accelerator import open_accelerator
from tutti.accelerator.profiling.cases import MOST_COPIES, ProfileCase, prepare
from tutti.accelerator.profiling.workspace import Workspace
from tutti.cost.measured.forms import FORMS, SERVED
from tutti.hardware.chip import Dtype

TINY = {
    "linear": (8, 16, 32),
    "grouped_linear": (10, 16, 32, 4),
    "narrow_linear": (16, 16, 32),
    "narrow_grouped_linear": (10, 16, 32, 4),
    "attention": (2, 8, 4, 2, 16, 16),
    **dict.fromkeys(
        ("scored_attention", "sink_attention", "biased_attention"), (2, 8, 4, 2, 16, 16)
    ),
    "rotary": (8, 4, 16),
    "add": (64,),
    "copy": (64,),
    "embedding": (8, 16, 32),
    "linear_cross_entropy": (8, 32, 16),
    "route": (8, 16, 2),
    "permute": (8, 16, 2),
    "unpermute": (8, 16, 2),
    "adamw": (64,),
}


@pytest.fixture(scope="module")
def accelerator():
    return open_accelerator("cpu")


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr("tutti.accelerator.profiling.workspace.HOST_ELEMENTS", 1 << 16)


TRAINED = [name for name, form in FORMS.items() if form.directions != SERVED]


@pytest.mark.parametrize("operator", TRAINED)
@pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.BF16])
def test_each_pass_runs(operator, dtype, accelerator, small):
    case = ProfileCase(operator, TINY.get(operator, (8, 16)))
    prepared = prepare(case, Workspace(accelerator, dtype), accelerator.operators)
    assert set(prepared.runs) == set(FORMS[operator].directions)
    assert prepared.kernel
    for direction, run in prepared.runs.items():
        for _ in range(2):  # graphs must survive their backward
            found = run()
        if direction == "input_gradient":
            (gradient,) = found
            assert gradient.shape[0] == case.shape[0]


def test_a_product_gradient_is_the_right_one(accelerator, small):
    case = ProfileCase("linear", (8, 16, 32))
    prepared = prepare(case, Workspace(accelerator, Dtype.FP32), accelerator.operators)
    (by_input,), (once,) = (prepared.runs[d]() for d in ("input_gradient", "weight_gradient"))
    assert by_input.shape == (8, 32)
    assert (once.shape, once.dtype) == ((16, 32), torch.float32)
    assert once.abs().sum() > 0
    assert prepared.runs["forward"]().shape == (8, 16)


def test_copies_take_turns_until_the_caches_are_left(accelerator, small):
    space = Workspace(accelerator, Dtype.FP32)
    run = prepare(ProfileCase("rms_norm", (8, 16)), space, accelerator.operators).runs["forward"]
    sums = [float(run().sum().detach()) for _ in range(2 * MOST_COPIES)]
    assert sums[:MOST_COPIES] == sums[MOST_COPIES:]
    assert len(set(sums[:MOST_COPIES])) == MOST_COPIES
    space.cache_bytes = 1
    run = prepare(ProfileCase("rms_norm", (8, 16)), space, accelerator.operators).runs["forward"]
    assert torch.equal(run(), run())


def test_a_workspace_gives_what_its_buffer_cannot(accelerator, small):
    space = Workspace(accelerator, Dtype.FP32)
    large = space.take(1 << 10, 1 << 7)
    assert large.shape == (1 << 10, 1 << 7)
    assert large.requires_grad
    assert 0.05 < float(large.detach().std()) < 0.2
    assert space.like(torch.zeros(3, dtype=torch.float64)).dtype == torch.float64
