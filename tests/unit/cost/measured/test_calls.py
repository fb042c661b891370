"""The engine's calls do the work that the model's operators count, for every model we know."""

from __future__ import annotations

import numpy as np
import pytest

from tutti.cost.measured.calls import unit_calls
from tutti.cost.measured.forms import FORMS
from tutti.cost.measured.unit import strategy_of
from tutti.models.flops import unit_operators
from tutti.models.load import catalog_names, load_model
from tutti.models.operators import OperatorKind, Workload

SAMPLE = sorted(catalog_names())


@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.parametrize("tp", [1, 2])
def test_products_are_those_of_the_model(name, tp):
    spec = load_model(name)
    if spec.tensor_parallel_problem(tp) is not None:
        pytest.skip("cannot be sliced so")
    work = Workload(sequences=2, sequence_length=512, tp=tp)
    kinds = {spec.unit_kind(unit): unit for unit in range(1, spec.head_unit)}
    for unit in kinds.values():
        ours = sum(
            float(np.asarray(call.times * FORMS[call.operator].flops(call.dims)))
            for call in unit_calls(spec, unit, strategy_of(work))
            if FORMS[call.operator].part == "gemm"
        )
        model = sum(
            op.forward.flops
            for op in unit_operators(spec, unit, work)
            if op.kind in (OperatorKind.GEMM, OperatorKind.GROUPED_GEMM) and op.n > 1
        )
        # sliced routers and latents are counted on each rank or once: a small part
        assert ours == pytest.approx(model, rel=0.02 if tp == 1 else 0.12)


def test_the_head_multiplies_three_times_and_windows_leave_pairs_out():
    spec = load_model("llama-3.2-1b")
    work = Workload(sequences=1, sequence_length=1024)
    (head,) = (
        call
        for call in unit_calls(spec, spec.head_unit, strategy_of(work))
        if call.operator == "linear_cross_entropy"
    )
    assert float(FORMS[head.operator].flops(head.dims)) == 6.0 * 1024 * spec.vocab * spec.hidden
    gemma = load_model("gemma-2-2b")
    long = Workload(sequences=2, sequence_length=8192)
    calls = {
        gemma.blocks[unit - 1].attention.window: call
        for unit in (1, 2)
        for call in unit_calls(gemma, unit, strategy_of(long))
        if call.operator == "scored_attention"  # capped
    }
    dims = {w: [float(np.asarray(d)) for d in call.dims] for w, call in calls.items()}
    flops = {w: float(np.asarray(FORMS["scored_attention"].flops(call.dims))) for w, call in
             calls.items()}  # fmt: skip
    assert dims[None][:2] == [2.0, 8192.0]
    # a window of half the sequence leaves three quarters of the pairs, in shorter sequences
    assert flops[4096] / flops[None] == pytest.approx(0.75, abs=0.001)
    assert dims[4096][0] * dims[4096][1] == pytest.approx(2.0 * 8192.0)
    assert dims[4096][1] == pytest.approx(0.75 * 8192.0, rel=0.001)
