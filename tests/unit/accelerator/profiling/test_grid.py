"""What is measured, and in which order."""

from __future__ import annotations

from collections import Counter

import pytest

from tutti.accelerator.profiling.grid import default_cases, model_cases
from tutti.cost.measured.forms import FORMS, SERVED
from tutti.cost.measured.unit import unit_shapes
from tutti.models.load import load_model
from tutti.models.operators import Workload


def test_the_grid_covers_every_operator_and_repeats_none():
    cases = default_cases()
    assert len(set(cases)) == len(cases)
    trained = {name for name, form in FORMS.items() if form.directions != SERVED}
    assert {case.operator for case in cases} == trained
    for case in cases:
        assert len(case.shape) == len(FORMS[case.operator].dims)
        assert min(case.shape) >= 1
        assert case.flops >= 0
        assert case.elements > 0
    assert any(str(case).startswith("linear 512×") for case in cases)


def test_the_first_tenth_tells_of_what_a_block_is_made_of():
    cases = default_cases()
    early = Counter(case.operator for case in cases[: len(cases) // 10])
    for name in ("linear", "attention", "rms_norm", "add_rms_norm", "gated_activation", "rotary",
                 "add", "adamw", "embedding", "linear_cross_entropy"):  # fmt: skip
        assert early[name] > 0, name
    assert early.most_common(1)[0][0] == "linear"


@pytest.mark.parametrize("name", ["llama-3.2-1b", "gpt2", "qwen3-30b-a3b", "deepseek-v2-lite"])
def test_a_models_own_shapes_come_first(name):
    spec = load_model(name)
    cases = model_cases(spec, [2048, 8192], 4096)
    from tutti.cost.measured.forms import row_name

    found = {
        (row_name(case.operator, direction), case.shape)
        for case in cases
        for direction in FORMS[case.operator].directions
    }
    for unit in (0, 1, spec.num_layers, spec.head_unit):
        work = Workload(sequences=2, sequence_length=4096)
        assert unit_shapes(spec, unit, work) <= found
    whole = model_cases(spec, [8192], 4096, degrees=(1,))
    assert cases[0].shape[0] in (2048, 8192)
    assert len(whole) < len(cases)
