"""Logits, loss and every parameter's gradient equal transformers' in float32, for every type."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.support.parity import (  # noqa: E402
    LENGTHS,
    TINY,
    differences,
    hf_model,
    our_model,
    parity_config,
    run_hf,
    run_ours,
    tokens_and_targets,
    zero_gradients,
)
from tests.support.slow_types import with_slow  # noqa: E402
from tutti.models import read_config  # noqa: E402
from tutti.models.families import model_types  # noqa: E402

LOGITS = 1e-5  # largest difference
GRADIENTS = 1e-5  # of the gradient's norm


@pytest.mark.parametrize("name", with_slow(TINY, first=True))
def test_a_packed_batch_equals_transformers_on_each_sequence(name: str) -> None:
    values = parity_config(name)
    spec = read_config(values, name)
    hf = hf_model(name, values)
    ours = our_model(hf, spec)
    tokens, targets = tokens_and_targets(spec.vocab)
    packed = run_ours(ours, tokens, targets, LENGTHS)
    theirs = run_hf(hf, spec, tokens, targets, LENGTHS)
    logits, gradients = differences(packed, theirs, zero_gradients(spec))
    assert logits <= LOGITS
    assert packed.loss == pytest.approx(theirs.loss, rel=1e-6)
    worst = max(gradients, key=lambda key: gradients[key])
    assert gradients[worst] <= GRADIENTS, worst
    alone = [
        run_ours(ours, *pair, [len(pair[0])]).logits_tv
        for pair in zip(tokens.split(list(LENGTHS)), targets.split(list(LENGTHS)), strict=True)
    ]
    assert float((torch.cat(alone) - packed.logits_tv).abs().max()) <= LOGITS


def test_every_type_is_compared() -> None:
    assert {str(parity_config(name)["model_type"]) for name in TINY} == set(model_types())
    assert len(model_types()) >= 30


def test_windows_and_scalings_are_in_reach() -> None:
    """A window or a scaling that no token reaches would be compared in vain."""
    for name in TINY:
        spec = read_config(parity_config(name), name)
        for block in spec.blocks:
            window, rotary = block.attention.window, block.attention.rotary
            assert window is None or window < min(LENGTHS), name
            if rotary is not None and rotary.scaling is not None:
                scaling = rotary.scaling
                if scaling.kind in ("dynamic", "longrope"):
                    assert (scaling.original_length or 0) < max(LENGTHS), name
