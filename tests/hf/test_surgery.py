"""Averaged, grown and stretched models are what transformers makes of the same tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.support.hf_models import saved, tiny_model  # noqa: E402
from tests.support.parity import hf_model  # noqa: E402
from tests.support.tiny_configs import tiny_config  # noqa: E402
from tutti.accelerator.operators import Operators  # noqa: E402
from tutti.errors import InputError  # noqa: E402
from tutti.huggingface import open_checkpoint  # noqa: E402
from tutti.huggingface.surgery import average, grow, stretch  # noqa: E402
from tutti.nn import Batch, Model, load  # noqa: E402

# plain, tied, transposed and fused, experts
KINDS = ("llama/gqa", "qwen3", "gpt2", "phi3", "mixtral/4")
TOKENS = torch.arange(3, 51)


def loaded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=TOKENS[None], use_cache=False).logits[0]
    return found


@pytest.mark.parametrize("name", KINDS)
def test_an_average_is_the_mean_of_every_tensor(name: str, tmp_path: Path) -> None:
    first = tiny_model(tiny_config(name))
    other = tiny_model(tiny_config(name))
    with torch.no_grad():
        for number, tensor in enumerate(other.parameters()):
            tensor.mul_(0.5 + number % 3)
    folders = [saved(first, tmp_path / "a"), saved(other, tmp_path / "b")]
    average(folders, tmp_path / "mean", weights=[3, 1])
    found = loaded(tmp_path / "mean").state_dict()
    for key, one in first.state_dict().items():
        wanted = 0.75 * one.double() + 0.25 * other.state_dict()[key].double()
        torch.testing.assert_close(found[key].double(), wanted, rtol=1e-6, atol=1e-9)


def test_bfloat16_is_rounded_once(tmp_path: Path) -> None:
    model = tiny_model(tiny_config("llama"), torch.bfloat16)
    folders = [saved(model, tmp_path / name) for name in "abc"]
    average(folders, tmp_path / "mean")
    assert (tmp_path / "mean/model.safetensors").read_bytes() == (
        tmp_path / "a/model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("name", KINDS)
def test_a_grown_model_says_what_it_said(name: str, tmp_path: Path) -> None:
    model = tiny_model(tiny_config(name)).eval()
    folder = saved(model, tmp_path / "small", max_shard_size="40KB")
    grow(folder, tmp_path / "grown", vocabulary=200)
    grown = loaded(tmp_path / "grown")
    assert grown.config.vocab_size == 200
    torch.testing.assert_close(logits(grown)[:, :160], logits(model), rtol=0, atol=1e-6)
    for own, old in (
        (grown.get_input_embeddings(), model.get_input_embeddings()),
        (grown.get_output_embeddings(), model.get_output_embeddings()),
    ):
        mean = old.weight.detach().mean(0)
        torch.testing.assert_close(own.weight[160:], mean.expand(40, -1), rtol=1e-5, atol=1e-7)
    assert open_checkpoint(tmp_path / "grown").spec.vocab == 200


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_a_stretched_model_computes_as_transformers_does(kind: str, tmp_path: Path) -> None:
    model = hf_model("qwen3", {**tiny_config("qwen3"), "max_position_embeddings": 16})
    stretch(saved(model, tmp_path / "short"), tmp_path / "long", factor=4.0, kind=kind)
    theirs = loaded(tmp_path / "long")
    assert theirs.config.max_position_embeddings == 64
    assert theirs.config.rope_parameters["rope_type"] == kind
    checkpoint = open_checkpoint(tmp_path / "long")
    ours = Model(checkpoint.spec, Operators("cpu"))
    load(ours, checkpoint)
    with torch.no_grad():
        found = ours.logits(Batch.of(ours.spec, TOKENS, [len(TOKENS)]))
    torch.testing.assert_close(found, logits(theirs), rtol=0, atol=1e-5)
    assert float((found - logits(model)).abs().max()) > 1e-3, "nothing was stretched"


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    def folder(name: str) -> Path:
        path = tmp_path / name.replace("/", "-")
        return path if path.exists() else saved(tiny_model(tiny_config(name)), path)

    target = tmp_path / "target"
    cases: list[tuple[Any, str]] = [
        (lambda: average([folder("llama")], target), "two folders or more"),
        (lambda: average([folder("llama"), folder("qwen3")], target), "is no checkpoint of the"),
        (lambda: average([folder("llama")] * 2, target, weights=[0, 0]), "one of them is above 0"),
        (lambda: average([folder("llama")] * 2, target, weights=[1]), "1 weights for 2 folders"),
        (lambda: grow(folder("llama"), target, vocabulary=160), "160 rows already"),
        (lambda: stretch(folder("gpt2"), target, factor=2.0), "no rotary positions"),
        (lambda: stretch(folder("llama/yarn"), target, factor=2.0), "stretched already"),
        (lambda: stretch(folder("llama"), target, factor=1.0), "must be above 1"),
        (lambda: stretch(folder("llama"), target, factor=2.0, kind="ntk"), "known: linear, yarn"),
        (lambda: stretch(folder("gemma3_text"), target, factor=2.0), "each kind of layer"),
    ]
    for call, text in cases:
        with pytest.raises(InputError, match=text) as error:
            call()
        assert "\n" not in str(error.value)
        assert not target.exists()
