"""Objectives of reward models, and what their head comes to: parameters, FLOPs, memory."""

from __future__ import annotations

from typing import Any

import pytest

from tutti.models.flops import flops_per_token, unit_operators
from tutti.models.load import load_model
from tutti.models.objective import Objective
from tutti.models.operators import Workload


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"kind": "reward", "beta": 0.1}, "'beta' is for answers with probabilities"),
        ({"kind": "reward", "margin": 0.1}, "a reward model's margins are a field of the data"),
        ({"kind": "orpo", "margin": 0.1}, "'margin' is for simpo, not for orpo"),
        ({"kind": "dpo", "centre": 0.1}, "'centre' is for reward models, not for dpo"),
        ({"kind": "reward", "answer_loss": 1.0}, "'answer_loss' is of tokens"),
        ({"kind": "reward", "reference": "there"}, "reward has no reference model"),
    ],
)
def test_options_of_other_kinds_are_refused(given: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        Objective(**given)


@pytest.mark.parametrize("name", ["llama-3-8b", "smollm2-135m", "gemma-2-2b"])
def test_the_head_is_one_vector_and_costs_no_more(name: str) -> None:
    model = load_model(name)
    scored = model.with_scores()
    own = {p.name: p for p in scored.parameters(scored.head_unit)}
    assert own["score.weight"].shape == (1, model.hidden)
    assert not scored.ties_weights
    table = 0 if model.head.tied else model.vocab * model.hidden
    assert scored.num_parameters == model.num_parameters - table + model.hidden
    assert flops_per_token(model, 512) - flops_per_token(scored, 512) == pytest.approx(
        6 * (model.vocab - 1) * model.hidden
    )
    work = Workload(sequences=1, sequence_length=512)
    kept = [k for op in unit_operators(scored, scored.head_unit, work) for k in op.kept]
    assert sum(k.bytes for k in kept) < 5 * 512 * model.hidden * work.element_bytes
    assert scored.fingerprint != model.fingerprint
    assert scored.with_scores() is scored
