"""Phi-3.5-MoE's router: choices, weights and gradients of transformers' SparseMixer, undrawn."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers.models.phimoe.modeling_phimoe import sparsemixer  # noqa: E402

from tests.support.tiny_configs import tiny_config  # noqa: E402
from tutti.accelerator.reference.experts import route  # noqa: E402
from tutti.errors import InputError  # noqa: E402
from tutti.models import read_config  # noqa: E402
from tutti.models.parts import RouterSpec  # noqa: E402

DRAWS = 40


def test_choices_weights_and_gradients_of_random_logits() -> None:
    alone = beside = 0
    for seed in range(DRAWS):
        draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        noise = draw.choice((0.0, 0.01, 0.1, 0.3))
        shape = (draw.randint(1, 50), draw.randint(2, 20))
        # some of the wide ones are below zero altogether, where a distance is a part of the rest
        logits = torch.randn(shape, generator=generator) * 3 - draw.choice((0, 0, 8))
        ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
        routing = route(ours, RouterSpec(scores="near_softmax", near=2 * noise), 2)
        weights, experts = sparsemixer(theirs, noise, training=False)
        assert torch.equal(routing.experts, experts)
        torch.testing.assert_close(routing.weights, weights, rtol=1e-6, atol=1e-7)
        pull = torch.randn(weights.shape, generator=generator)
        (routing.weights * pull).sum().backward()
        (weights * pull).sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)
        alone += int((weights == 1).sum())
        beside += int((weights < 1).sum())
    assert alone > 100  # an expert without a rival
    assert beside > 100


def test_a_trained_draw_has_the_gradient_of_its_weight() -> None:
    """Where transformers' training draws the best, its estimate is what ours trains by."""
    torch.manual_seed(3)
    compared = 0
    for _ in range(20):
        logits = torch.randn(64, 8)
        ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
        routing = route(ours, RouterSpec(scores="near_softmax", near=0.5), 2)
        weights, experts = sparsemixer(theirs, 0.25, training=True)
        same = (experts == routing.experts).all(-1)
        pull = torch.randn(weights.shape) * same.unsqueeze(-1)
        (routing.weights * pull).sum().backward()
        (weights * pull).sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
        compared += int(same.sum())
    assert compared > 100


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_experts_per_tok": 3}, "'num_experts_per_tok' is 3"),
        ({"rope_scaling": {"long_mscale": 1.5}}, "'long_mscale' is 1.5"),
    ],
)
def test_what_transformers_would_compute_otherwise_is_refused(
    changed: dict[str, object], said: str
) -> None:
    config = tiny_config("phimoe/long")
    for key, value in changed.items():
        own = config.get(key)
        config[key] = {**own, **value} if isinstance(own, dict) else value  # type: ignore[dict-item]
    with pytest.raises(InputError, match=said) as error:
        read_config(config, "m")
    assert "\n" not in str(error.value)
    print(error.value)
