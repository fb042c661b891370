"""Operators as servers run them: every one runs, and computes what the model would."""

from __future__ import annotations

import pytest
import torch

from tutti.accelerator import open_accelerator
from tutti.accelerator.profiling.cases import ProfileCase
from tutti.accelerator.profiling.served_cases import prepare_served
from tutti.accelerator.profiling.served_grid import served_cases, served_model_cases
from tutti.accelerator.profiling.session import Session
from tutti.accelerator.profiling.workspace import Workspace
from tutti.cost.measured.chip import SERVING, MeasuredChip
from tutti.cost.measured.forms import FORMS, SERVED
from tutti.hardware.chip import Dtype
from tutti.models.load import load_model

TINY = {
    "linear": (3, 16, 32),
    "fp8_linear": (3, 16, 32),
    "int8_linear": (3, 16, 32),
    "grouped_linear": (5, 16, 32, 8),
    "decode_attention": (3, 40, 4, 2, 16, 16),
    "chunk_attention": (5, 20, 4, 2, 16, 16),
    "store_heads": (5, 4, 2, 16),
    "store_normed_heads": (5, 4, 2, 16),
    "sample": (3, 64),
    "embedding": (3, 16, 32),
    "add_rms_norm": (3, 16),
    "gated_activation": (3, 16),
    "route": (3, 16, 2),
    "permute": (3, 16, 2),
    "unpermute": (3, 16, 2),
}
SHAPES = {
    "linear": (3, 16),
    "fp8_linear": (3, 16),
    "grouped_linear": (5, 16),
    "decode_attention": (3, 4, 16),
    "chunk_attention": (5, 4, 16),
    "sample": (3,),
}


@pytest.fixture(scope="module")
def accelerator():
    return open_accelerator("cpu")


@pytest.fixture
def space(monkeypatch, accelerator):
    monkeypatch.setattr("tutti.accelerator.profiling.workspace.HOST_ELEMENTS", 1 << 16)
    monkeypatch.setattr("tutti.accelerator.profiling.workspace.HOST_CACHE", 1)
    return Workspace(accelerator, Dtype.FP32)


@pytest.mark.parametrize("operator", TINY)
def test_each_operator_of_a_server_runs(operator, accelerator, space):
    case = ProfileCase(operator, TINY[operator], serves=True)
    prepared = prepare_served(case, space, accelerator)
    assert set(prepared.runs) == set(SERVED)
    assert prepared.kernel
    found = prepared.runs["inference"]()
    if operator in SHAPES:
        assert tuple(found.shape) == SHAPES[operator]
        assert not found.requires_grad
        assert torch.isfinite(found.float()).all()


@pytest.mark.parametrize("operator", ["add_rms_norm", "gated_activation", "store_heads"])
def test_what_is_timed_is_what_a_server_runs(operator, accelerator, space, monkeypatch):
    """A host's servers have loops of their own, which training does not have."""
    pytest.importorskip("numba")
    from tutti.accelerator.host import rows

    ran, real = [], rows._form
    monkeypatch.setattr(rows, "_form", lambda *given: (ran.append(given[1]), real(*given))[1])
    made = prepare_served(ProfileCase(operator, TINY[operator], serves=True), space, accelerator)
    made.runs["inference"]()
    assert ran == [{"gated_activation": "gated_silu"}.get(operator, operator)]


def test_products_of_few_rows_are_timed_as_they_are_in_the_long_run(accelerator, space):
    pytest.importorskip("numba")
    case = ProfileCase("linear", TINY["linear"], serves=True)
    assert prepare_served(case, space, accelerator).kernel == "prepared"


def test_all_that_only_servers_run_is_tried_here():
    assert {name for name, form in FORMS.items() if form.directions == SERVED} <= set(TINY)


def test_the_grid_and_a_model_hold_what_steps_need():
    for cases in (served_cases(), served_model_cases(load_model("qwen3-30b-a3b"), (1,))):
        assert all(case.serves for case in cases)
        assert set(SERVING) | {"grouped_linear", "store_normed_heads"} <= {
            case.operator for case in cases
        }


def test_a_profile_of_a_server_prices_its_steps(accelerator, monkeypatch):
    monkeypatch.setattr("tutti.accelerator.profiling.session.MOST_VISITS", 1)
    monkeypatch.setattr("tutti.accelerator.profiling.session.LAST_SIDE", 512)
    monkeypatch.setattr("tutti.accelerator.profiling.links.HOST_LARGE_BYTES", 1 << 20)
    shapes = [
        ProfileCase("linear", (64, 64, 64)),
        ProfileCase("attention", (1, 64, 4, 4, 16, 16)),
        *(ProfileCase(name, TINY[name], serves=True) for name in SERVING),
    ]
    session = Session(
        accelerator=accelerator, dtype=Dtype.FP32, cases=shapes, budget_s=600.0, origin="a test"
    )
    found = session.run()
    assert not session.refused
    names = {row.operator for row in found.operators}
    assert {f"{name}.inference" for name in SERVING} <= names
    assert not found.served_graphs, "the host has no graphs"
    chip = MeasuredChip(found, Dtype.FP32)
    assert chip.serves
    for name in SERVING:
        row = next(row for row in found.operators if row.operator == f"{name}.inference")
        priced = float(chip.seconds(name, "inference", row.shape))
        assert priced == pytest.approx(row.seconds, rel=1e-6)
