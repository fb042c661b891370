"""In batch-invariant mode a request's numbers have the same bits alone and in any company."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.support.engines import engine_of  # noqa: E402
from tests.support.models import fill, spec_of  # noqa: E402
from tutti.accelerator.devices.cpu import CpuAccelerator  # noqa: E402
from tutti.errors import InputError  # noqa: E402
from tutti.models import read_config  # noqa: E402
from tutti.nn import Model  # noqa: E402
from tutti.serve import Completion, SamplingParameters  # noqa: E402
from tutti.serve.loading import invariant_operators  # noqa: E402

PROMPT = [5, 9, 2, 40, 11, 3, 8, 1, 60, 33, 21]
OTHERS = [[7, 8], [3] * 19, [1, 2, 3, 4, 5], [9] * 30, [11, 12]]
WISHES = SamplingParameters(max_tokens=9, logprobs=20, prompt_logprobs=5, ignore_end=True)
WIDE = {  # products large enough for kernels to differ
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 701, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 2500,
    "max_position_embeddings": 128,
}  # fmt: skip


def model_of(kind: str) -> Model:
    spec = read_config(WIDE, kind) if kind == "wide" else spec_of(kind)
    operators = invariant_operators(spec, CpuAccelerator())
    return fill(Model(spec, operators, dtype=torch.float32)).eval().requires_grad_(False)


def numbers(done: Completion) -> list[object]:
    said, prompt = done.answers[0].logprobs, done.prompt_logprobs
    assert said is not None
    assert prompt is not None
    return [
        done.tokens,
        [(o.logprob, o.top) for o in said],
        [o and (o.logprob, o.top) for o in prompt],
    ]


@pytest.mark.parametrize("kind", ["wide", "dense", "tied", "alibi", "positions", "expert-bias"])
def test_no_bit_changes(kind: str) -> None:
    model = model_of(kind)
    alone = numbers(engine_of(model, max_length=60).generate([PROMPT], WISHES)[0])
    for size, tokens, slots, guesses in ((1, 5, 6, 0), (4, 33, 3, 2), (64, 200, 6, 0)):
        engine = engine_of(
            model, page_size=size, most_tokens=tokens, slots=slots, max_length=60, guesses=guesses,
            pages=200 if size == 1 else 50,
        )  # fmt: skip
        found = engine.generate([*OTHERS[:2], PROMPT, *OTHERS[2:]], WISHES)
        assert numbers(found[2]) == alone, (size, tokens)


def test_without_the_mode_bits_do_change() -> None:
    """Else the test above would say nothing."""
    model = model_of("wide")
    plain = CpuAccelerator().operators
    for module in model.modules():
        if hasattr(module, "operators"):
            module.operators = plain
    alone = numbers(engine_of(model, max_length=60).generate([PROMPT], WISHES)[0])
    engine = engine_of(model, page_size=4, most_tokens=33, slots=3, max_length=60)
    found = engine.generate([*OTHERS[:2], PROMPT, *OTHERS[2:]], WISHES)
    assert numbers(found[2]) != alone


def test_models_without_such_a_form_are_refused() -> None:
    for kind, what in (("latent", "latent attention"), ("experts", "gates of shared experts")):
        with pytest.raises(
            InputError, match=f"{kind}: batch-invariant mode has no form for {what}"
        ):
            invariant_operators(spec_of(kind), CpuAccelerator())
