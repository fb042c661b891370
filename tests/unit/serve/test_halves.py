"""Weights in 16 bits on a host without such products: what comes of them is of float32."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from tests.support.engines import engine_of  # noqa: E402
from tests.support.models import make, spec_of  # noqa: E402
from tutti.accelerator import open_accelerator  # noqa: E402
from tutti.accelerator.prepared import has_halves, is_in_halves, round_to_halves  # noqa: E402
from tutti.errors import InputError  # noqa: E402
from tutti.nn.head import Logits  # noqa: E402
from tutti.nn.linear import Linear  # noqa: E402
from tutti.serve import SamplingParameters  # noqa: E402
from tutti.serve.loading import keeps_halves, prepare  # noqa: E402

PROMPTS = [[5, 6, 7], [8, 9], [1, 4, 4, 2, 3]]


def test_tokens_are_those_of_the_rounded_weights() -> None:
    model = make(spec_of("dense"), dtype=torch.float32).eval().requires_grad_(False)
    rounded = copy.deepcopy(model)
    for module in rounded.modules():
        if isinstance(module, Linear | Logits):
            assert round_to_halves(module.weight)
    prepare(model, asked="fp16")
    wanted = SamplingParameters(max_tokens=8, ignore_end=True)
    options = {"slots": 3, "page_size": 4, "max_length": 32}
    found, expected = (
        [done.tokens for done in engine_of(one, **options).generate(PROMPTS, wanted)]
        for one in (model, rounded)
    )
    assert found == expected
    marked = [m for m in model.modules() if isinstance(m, Linear) and m.weight.dim() == 2]
    assert all(is_in_halves(m.weight) for m in marked) == has_halves()


def test_weights_beyond_halves_are_refused() -> None:
    model = make(spec_of("dense"), dtype=torch.float32).eval().requires_grad_(False)
    next(m for m in model.modules() if isinstance(m, Linear)).weight.data[0, 0] = 1e5
    with pytest.raises(InputError, match="beyond float16"):
        prepare(model, asked="fp16")


def test_other_formats_stay_what_they_are() -> None:
    accelerator = open_accelerator("cpu")
    assert not keeps_halves(torch.float32, accelerator)
    assert not keeps_halves(torch.bfloat16, accelerator)
