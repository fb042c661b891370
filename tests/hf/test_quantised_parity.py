"""A quantised folder's tokens are transformers' of the weights that it stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.support.packing import FORMATS, pack_folder  # noqa: E402
from tests.support.parity import IMPLEMENTATION, hf_model, parity_config  # noqa: E402
from tests.support.serving import Pair, reference, same  # noqa: E402
from tutti.serve import Engine, SamplingParameters  # noqa: E402

PROMPTS = ([5, 9, 2, 40, 11, 7, 3, 19], [7, 8], [3] * 17)
NEW = 12
CASES = [
    ("llama/3.1", "fp8/tensor"),
    ("llama/3.1", "int8"),
    ("llama/3.1", "gptq"),
    ("qwen3", "awq"),
    ("gemma2", "compressed/int4 zeros"),
    ("phi3/long", "gptq/sorted"),
    ("falcon/new", "compressed/fp8"),
    ("qwen3_moe/sparse", "fp8/block"),
    ("qwen3_moe/sparse", "compressed/int4"),
    ("deepseek_v3/small", "fp8/block"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root, made = tmp_path_factory.mktemp("saved"), {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = root / name.replace("/", "-")
            hf_model(name, parity_config(name)).save_pretrained(made[name])
        return made[name]

    return folder


def opened(folder: Path, name: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation=IMPLEMENTATION.get(name, "eager"),
        experts_implementation="eager",
    ).eval()


@pytest.mark.parametrize(("name", "form"), CASES)
def test_tokens_are_transformers(saved: Any, tmp_path: Path, name: str, form: str) -> None:
    twin = pack_folder(saved(name), tmp_path / "q", FORMATS[form])
    engine = Engine.from_pretrained(tmp_path / "q", dtype="fp32", page_size=4, max_length=64)
    hf = opened(twin, name)
    found = Pair(name, hf, engine.worker.model.spec, engine.worker.model)
    own = SamplingParameters(max_tokens=NEW, ignore_end=True)
    said = set()
    for prompt, done in zip(PROMPTS, engine.generate(list(PROMPTS), own), strict=True):
        tokens, gaps = reference(found, prompt, NEW)
        assert same(done.tokens, tokens, gaps), (done.tokens, tokens)
        said |= set(done.tokens)
    assert len(said) > 3, "who says one thing only is compared in vain"
