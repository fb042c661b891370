"""Quantised weights and adapters over two ranks: the tokens are those of one process."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from tests.support.engines import engine_of  # noqa: E402
from tests.support.gloo import World, run_processes  # noqa: E402
from tests.support.packing import FORMATS, pack_folder, random_folder  # noqa: E402
from tests.support.peft_folders import ALL, write_adapter  # noqa: E402
from tutti.accelerator.operators import Operators  # noqa: E402
from tutti.huggingface import open_checkpoint  # noqa: E402
from tutti.nn import ALONE, Model, ParallelContext, Ranks  # noqa: E402
from tutti.nn.quantised import load_quantised  # noqa: E402
from tutti.serve import SamplingParameters  # noqa: E402

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 67, "head_dim": 16,
    "max_position_embeddings": 64, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "mlp_only_layers": [0],
}  # fmt: skip
FORMS = ("fp8/block", "int8", "compressed/int4 zeros")
PROMPTS = [[5, 9, 2, 40, 11], [7, 8], [3] * 9]
OWN = SamplingParameters(max_tokens=8, ignore_end=True)


def tokens_of(folder: Path, adapter: Path, parallel: ParallelContext) -> list[tuple[int, ...]]:
    checkpoint = open_checkpoint(folder, quantised=True)
    model = Model(checkpoint.spec, Operators("cpu"), device="meta", parallel=parallel)
    load_quantised(model, checkpoint, torch.device("cpu"))
    engine = engine_of(model, slots=3, page_size=4)
    engine.add_adapter("a", adapter)
    wishes = [replace(OWN, adapter=name) for name in ("a", "", "a")]
    return [done.tokens for done in engine.generate(PROMPTS, wishes)]


def serve(root: Path, rank: int) -> list[list[tuple[int, ...]]]:
    del rank
    parallel = Ranks(tensor=World())
    return [tokens_of(root / str(i), root / "adapter", parallel) for i in range(len(FORMS))]


def test_sliced_weights_say_the_same(tmp_path: Path) -> None:
    plain = random_folder(tmp_path / "plain", CONFIG)
    modules = tuple(module for module in ALL if module not in ("gate_proj", "up_proj", "down_proj"))
    write_adapter(plain, tmp_path / "adapter", modules=modules)
    for number, form in enumerate(FORMS):
        pack_folder(plain, tmp_path / str(number), FORMATS[form])
    # kernels that are compiled here are found by the ranks
    alone = [tokens_of(tmp_path / str(i), tmp_path / "adapter", ALONE) for i in range(len(FORMS))]
    both = run_processes(functools.partial(serve, tmp_path), 2, tmp_path)
    for number, form in enumerate(FORMS):
        assert [found[number] for found in both] == [alone[number], alone[number]], form
