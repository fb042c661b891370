"""A new Llama-like type in a few declarative lines runs like any other, as the docs say."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.support.parity import (  # noqa: E402
    LENGTHS,
    differences,
    hf_model,
    run_hf,
    run_ours,
    tokens_and_targets,
)
from tutti.accelerator.operators import Operators  # noqa: E402
from tutti.errors import InputError  # noqa: E402
from tutti.huggingface import maps, open_checkpoint  # noqa: E402
from tutti.huggingface.maps.llama_like import LLAMA  # noqa: E402
from tutti.models import read_config  # noqa: E402
from tutti.models.families import registry  # noqa: E402
from tutti.models.families.decoder import Attention, Decoder, Mlp, same_window  # noqa: E402
from tutti.models.families.llama_like import per_head_norm  # noqa: E402
from tutti.nn import Model, load  # noqa: E402

# The whole declaration: what differs from Llama, and that the tensors have Llama's names.
ACME = Decoder(
    model_type="acme",
    differs={"max_position_embeddings": 8192, "sliding_window": 8},
    attention=Attention(qkv_bias=True, output_bias=True, qk_norm=per_head_norm, window=same_window),
    feed_forward=Mlp(bias=False),
)

# A transformers type that computes the same, under another name.
TWIN = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 160,
    "attention_bias": True,
    "use_sliding_window": True,
    "sliding_window": 8,
    "max_window_layers": 0,
}


@pytest.fixture
def acme(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    monkeypatch.setattr(maps.registry, "_MAPS", dict(maps.registry._MAPS))
    registry.register(ACME)
    maps.register(LLAMA, "acme")
    return


def test_a_declared_type_equals_its_twin(acme: None) -> None:
    hf = hf_model("qwen3", TWIN)
    with tempfile.TemporaryDirectory() as folder:
        hf.save_pretrained(folder)
        config = Path(folder) / "config.json"
        values = json.loads(config.read_text())
        kept = {k: values[k] for k in TWIN if k not in ("model_type", "max_window_layers")}
        config.write_text(json.dumps({"model_type": "acme", "pad_token_id": 0, **kept}))
        checkpoint = open_checkpoint(folder)
        model = Model(checkpoint.spec, Operators("cpu"))
        load(model, checkpoint)
    assert model.spec.model_type == "acme"
    tokens, targets = tokens_and_targets(160)
    theirs = run_hf(hf, read_config(TWIN, "twin"), tokens, targets, LENGTHS)
    logits, gradients = differences(run_ours(model, tokens, targets, LENGTHS), theirs)
    assert logits <= 1e-5
    assert max(gradients.values()) <= 1e-5


def test_without_the_declaration_it_is_refused() -> None:
    with pytest.raises(InputError, match="acme"):
        read_config({**TWIN, "model_type": "acme"}, "acme")
