"""The router's balancing loss: per sequence, and what transformers' has in common with it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.support.models import LENGTHS, batch_of, make, spec_of  # noqa: E402
from tutti.accelerator.operators import Operators  # noqa: E402
from tutti.nn import ALONE, Batch  # noqa: E402
from tutti.nn.balance import balance_loss  # noqa: E402

SPEC = spec_of("experts")
MOE = SPEC.block(1).moe
COEFFICIENT = 0.5 * 2 / SPEC.num_layers  # of the config, for two choices in each layer


def loss_of(logits: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    assert MOE is not None
    routing = Operators("cpu").route(logits, MOE.router, MOE.experts_per_token)
    batch = Batch.of(SPEC, torch.zeros(len(logits), dtype=torch.long), lengths)
    return balance_loss(routing, MOE, batch, ALONE, spread=False)


def test_it_is_the_formula_of_each_sequence() -> None:
    assert MOE is not None
    logits = torch.randn(sum(LENGTHS), MOE.experts, dtype=torch.float64)
    expected = 0.0
    for own in logits.split(list(LENGTHS)):
        probabilities = own.softmax(-1)
        chosen = probabilities.topk(MOE.experts_per_token, -1).indices
        for expert in range(MOE.experts):
            count = int((chosen == expert).sum())
            share = MOE.experts / (MOE.experts_per_token * len(own)) * count
            expected += len(own) * share * float(probabilities[:, expert].mean())
    found = float(loss_of(logits, LENGTHS))
    assert found == pytest.approx(COEFFICIENT * expected, rel=1e-12)


def test_packing_does_not_change_it() -> None:
    assert MOE is not None
    logits = torch.randn(sum(LENGTHS), MOE.experts, dtype=torch.float64)
    alone = sum(float(loss_of(own, (len(own),))) for own in logits.split(list(LENGTHS)))
    assert float(loss_of(logits, LENGTHS)) == pytest.approx(alone, rel=1e-12)


def test_perfect_balance_is_the_coefficient_per_token() -> None:
    assert MOE is not None
    logits = 20.0 * torch.eye(MOE.experts, dtype=torch.float64)
    logits = logits + 20.0 * torch.eye(MOE.experts, dtype=torch.float64).roll(1, 1)
    found = float(loss_of(logits, (MOE.experts,)))
    assert found == pytest.approx(COEFFICIENT * MOE.experts, rel=1e-6)


def test_it_reaches_the_output_and_the_router() -> None:
    model, batch = make(SPEC), batch_of(SPEC)
    out = model(None, batch)
    out.balance.backward()
    routers = [x for x in model.logical_tensors() if x.name.endswith("moe.router.weight")]
    assert all(float(x.gradient.norm()) > 0 for x in routers)
    with torch.no_grad():  # the first run of what is recomputed, and an evaluation
        assert torch.equal(model(None, batch).balance, out.balance.detach())


def test_transformers_agrees_for_one_layer_and_one_sequence() -> None:
    """It averages over all layers and sequences first, which is the same for one of each."""
    modeling = pytest.importorskip("transformers.models.qwen2_moe.modeling_qwen2_moe")
    assert MOE is not None
    logits = torch.randn(40, MOE.experts)
    theirs = modeling.load_balancing_loss_func((logits,), MOE.experts, MOE.experts_per_token)
    ours = loss_of(logits, (40,)) / 40 * SPEC.num_layers  # which all have an equal share
    assert 0.5 * float(theirs) == pytest.approx(float(ours), rel=1e-5)
